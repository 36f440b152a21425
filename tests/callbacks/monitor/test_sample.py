"""Sampling of ranks in large runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.callbacks.monitor import records
from trainwright.callbacks.monitor.records import MonitorFile
from trainwright.callbacks.monitor.sample import is_sampled, sampled_ranks
from trainwright.callbacks.monitor.trace.profile import Profile


@pytest.mark.parametrize(("world_size", "most"), [(10, 3), (1000, 64), (1025, 1024), (100_000, 1024), (4096, 64)])
def test_sample_is_spread_evenly(world_size: int, most: int) -> None:
    ranks = sampled_ranks(world_size, most)
    assert ranks[0] == 0
    assert most / 2 <= len(ranks) <= most
    of_neighbours = -(-world_size // most)
    assert max(later - rank for rank, later in zip(ranks, ranks[1:], strict=False)) <= 2 * of_neighbours
    # On nodes of 8 ranks, every local rank is sampled.
    assert len({rank % 8 for rank in ranks}) >= min(8, of_neighbours, len(ranks))


def test_small_world_is_sampled_whole() -> None:
    assert sampled_ranks(64, 64) == list(range(64))
    assert sampled_ranks(5000, None) == list(range(5000))
    assert is_sampled(4999, 5000, None)


def of_rank(rank: int, world_size: int) -> Any:
    return SimpleNamespace(global_rank=rank, world_size=world_size, callbacks=[], log_every_n_steps=50)


def test_bounded_number_of_record_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(records, "rank_zero_info", said.append)
    for rank in range(40):
        for most in (10, None) if rank < 4 else (10,):
            callback = MonitorFile(str(tmp_path / str(most)), most_ranks=most)
            callback.setup(of_rank(rank, 40), None, "fit")  # type: ignore[arg-type]
            callback.on_record(of_rank(rank, 40), {"kind": "x"})
            callback.teardown(of_rank(rank, 40), None, "fit")  # type: ignore[arg-type]
    assert sorted(int(path.stem[5:]) for path in (tmp_path / "10/monitor").iterdir()) == sampled_ranks(40, 10)
    assert len(list((tmp_path / "None/monitor").iterdir())) == 4
    assert said[0].startswith("MonitorFile: of 40 ranks 10 keep records in ")
    assert "monitor.file.most_ranks=null" in said[0]


def test_only_sampled_ranks_poll_for_traces(tmp_path: Path) -> None:
    looking = []
    for rank in range(8):
        profile = Profile([1, 2], str(tmp_path), most_ranks=2)
        loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
        trainer = SimpleNamespace(**vars(of_rank(rank, 8)), global_step=0, fit_loop=loop)
        profile.on_train_start(trainer, None)  # type: ignore[arg-type]
        if profile._window or profile._wanted:
            looking.append(rank)
    assert looking == sampled_ranks(8, 2) == [0, 5]
