"""Sharded data: each rank reads its own shards, and any number of ranks resumes the rest."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer, world_size
from tests.pool import RankError
from tests.trainer.shard_data import READ, SAMPLES, WRITE, indices, read_mosaic, write_lit, write_mosaic, write_tar
from trainwright import ShardedStream
from trainwright.trainer.data.reading import dealer_of
from trainwright.trainer.data.streams import sources
from trainwright.trainer.data.streams.pieces import UNKNOWN, Pieces, ShardPiece, deal

# Ranks, micro-batch, last optimizer step, workers; two stops within the first epoch.
LEGS = [(2, 3, 2, 2), (3, 2, 3, 2), (1, 4, -1, 1)]


class Numbers(pl.LightningModule):
    """Records its training samples without padding; its gradient is the mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.read: list[tuple[int, int, list[int]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        dealer: Any = dealer_of(self.trainer.fit_loop._combined_loader.flattened[0])
        if not dealer.is_padding(batch_idx):
            self.read.append((self.current_epoch, self.global_step, batch.tolist()))
        return self.weight * batch.float().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", batch.float().mean(), batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(
    folder: Path,
    kind: str,
    micro: int,
    steps: int,
    workers: int,
    resume: str | None,
    save: str | None,
    drop_last: bool = False,
    **options: Any,
) -> tuple[list[tuple[int, int, list[int]]], float]:
    module = Numbers()
    trainer = make_trainer(
        "ddp" if world_size() > 1 else "single",
        max_steps=steps,
        **{"global_batch_size": 12, "data_seed": 5, "max_epochs": 2, **options},
    )
    with mock.patch.object(sources, "_ROWS", 8):
        stream = ShardedStream(READ[kind](folder), buffer=8, shards_at_once=2)
    options = {"num_workers": workers, "persistent_workers": workers > 0, "drop_last": drop_last}
    loader = DataLoader(stream, batch_size=micro, collate_fn=indices, **options)
    trainer.fit(module, loader, ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return module.read, module.weight.item()


def epochs(found: list[Any]) -> dict[int, list[int]]:
    """Return the samples of all ranks by epoch."""
    read: dict[int, list[int]] = {}
    for records, _ in found:
        for epoch, _, samples in records:
            read.setdefault(epoch, []).extend(samples)
    return read


def write(folder: Path, kind: str) -> None:
    """Write the numbers; skip the test if the package for it is not installed."""
    package = {"mosaic": "streaming", "lit": "litdata"}.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    WRITE[kind](folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", WRITE)
def test_resume_on_any_ranks_and_workers(ranks, tmp_path, kind):
    folder = tmp_path / kind
    folder.mkdir()
    write(folder, kind)
    found: list[Any] = []
    resume = None
    for number, (count, micro, steps, workers) in enumerate(LEGS):
        save = str(tmp_path / f"{number}.ckpt")
        leg = ranks(fit, count, folder, kind, micro, steps, workers, resume, save, init_group=count > 1, timeout=90)
        if steps > 0:
            assert {epoch for records, _ in leg for epoch, *_ in records} == {0}
        found, resume = found + leg, save
    read = epochs(found)
    assert Counter(read[0]) == Counter(range(SAMPLES))
    assert Counter(read[1]) == Counter(range(SAMPLES))
    assert read[0] != read[1]
    # Every gradient is the mean over the samples of its step.
    means: dict[int, list[int]] = {}
    for records, _ in found:
        for _, step, samples in records:
            means.setdefault(step, []).extend(samples)
    assert found[-1][1] == pytest.approx(-sum(sum(step) / len(step) for step in means.values()), rel=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["map", "tar"])
def test_resume_is_exact(ranks, tmp_path, kind):
    folder, save = tmp_path / kind, str(tmp_path / "run.ckpt")
    folder.mkdir()
    write(folder, kind)
    whole = ranks(fit, 2, folder, kind, 3, -1, 2, None, None, timeout=90)
    stopped = ranks(fit, 2, folder, kind, 3, 2, 2, None, save, timeout=90)
    once_more = ranks(fit, 2, folder, kind, 3, 3, 2, save, f"{save}2", timeout=90)
    resumed = ranks(fit, 2, folder, kind, 3, -1, 2, f"{save}2", None, timeout=90)
    for rank in range(2):
        assert [*stopped[rank][0], *once_more[rank][0], *resumed[rank][0]] == whole[rank][0]
        assert resumed[rank][1] == whole[rank][1]


def fit_and_note_files(folder: Path, kind: str, seed: int) -> tuple[list[Any], list[str]]:
    """Return the result of :func:`fit`, and the data files that this rank opened."""
    opened: list[str] = []
    usual = open

    def noting(file: Any, *args: Any, **options: Any) -> Any:
        opened.append(Path(str(file)).name)
        return usual(file, *args, **options)

    # Packages may open the first shard to read its columns.
    forget = LambdaCallback(on_fit_start=lambda *_: opened.clear())
    with mock.patch("builtins.open", noting):
        read, _ = fit(folder, kind, 3, -1, 0, None, None, max_epochs=1, data_seed=seed, callbacks=[forget])
    return read, sorted({name for name in opened if Path(name).suffix in (".jsonl", ".mds", ".bin", ".tar")})


# All Arrow files are mapped at load time.
@pytest.mark.parametrize("kind", [kind for kind in WRITE if kind != "map"])
def test_ranks_open_only_their_shards(ranks, tmp_path, kind):
    write(tmp_path, kind)
    first = ranks(fit_and_note_files, 2, tmp_path, kind, 5, timeout=90)
    (_, one), (_, other) = first
    # With known sizes, the parts of ranks are equal, so ranks may share one shard.
    assert len(set(one) & set(other)) <= (kind in ("lit", "mosaic"))
    shards = len(list(tmp_path.rglob("*.tar")) or list(tmp_path.rglob("*.jsonl")) or set(one) | set(other))
    assert len(set(one) | set(other)) == shards > 2
    if kind == "tar":
        assert ranks(fit_and_note_files, 2, tmp_path, kind, 5, timeout=90) == first
        assert ranks(fit_and_note_files, 2, tmp_path, kind, 6, timeout=90) != first


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_without_trainer(tmp_path, workers):
    write(tmp_path, "tar")
    loader = DataLoader(ShardedStream(READ["tar"](tmp_path)), batch_size=4, num_workers=workers, collate_fn=indices)
    read = torch.cat(list(loader)).tolist()
    assert sorted(read) == list(range(SAMPLES)) != read
    in_order = ShardedStream(READ["tar"](tmp_path), shuffle=False)
    assert indices(list(in_order)).tolist() == list(range(SAMPLES))


def test_tar_sample(tmp_path):
    write(tmp_path, "tar")
    first = next(iter(ShardedStream([tmp_path / "0.tar"], shuffle=False)))
    assert first == {"__key__": "all/0000", "__url__": str(tmp_path / "0.tar"), "txt": b"0", "note.json": b"{}"}


def test_drop_last(ranks, tmp_path):
    write(tmp_path, "map")
    found = ranks(fit, 2, tmp_path, "map", 3, -1, 0, None, None, drop_last=True, max_epochs=1)
    assert sum(len(samples) for records, _ in found for *_, samples in records) == SAMPLES // 12 * 12


def test_changed_order_within_epoch(tmp_path):
    write(tmp_path, "tar")
    path = str(tmp_path / "run.ckpt")
    fit(tmp_path, "tar", 12, 2, 0, None, path)
    with pytest.raises(
        ValueError, match="order of samples was drawn from seed 5 when saved, now it is drawn from seed 6"
    ):
        fit(tmp_path, "tar", 12, -1, 0, path, None, data_seed=6)
    (tmp_path / "5.tar").unlink()
    with pytest.raises(
        ValueError, match="'6 shards of TarShards, 2 at once in blocks of 4' when saved, now it is '5 shards"
    ):
        fit(tmp_path, "tar", 12, -1, 0, path, None)


@pytest.mark.parametrize("kind", ["pickle", "pyd", "pth", "meta.pkl"])
def test_tar_pickles(tmp_path, kind):
    write_tar(tmp_path, kind)
    with pytest.raises(ValueError, match=r"0.tar holds all/0000.*a pickle"):
        next(iter(ShardedStream(READ["tar"](tmp_path), shuffle=False)))


def test_litdata_pickles(tmp_path):
    pytest.importorskip("litdata")
    write_lit(tmp_path, {1, 2})
    with pytest.raises(ValueError, match="hold pickle, which is a pickle"):
        ShardedStream(READ["lit"](tmp_path))


def refuse_mosaic(folder: Path) -> str:
    write_mosaic(folder, "pkl")
    with pytest.raises(ValueError, match="hold pkl, which is a pickle") as error:
        ShardedStream(read_mosaic(folder, allow_unsafe_types=True))
    return str(error.value)


@pytest.mark.skipif(importlib.util.find_spec("streaming") is None, reason="streaming is not installed")
def test_mosaic_pickles(ranks, tmp_path):
    ranks(refuse_mosaic, 1, tmp_path / "shards", init_group=False)


@pytest.mark.parametrize("change", [lambda data: data.shuffle(seed=1), lambda data: data.shuffle(seed=1).map(dict)])
def test_shuffled_data(tmp_path, change):
    write(tmp_path, "iterable")
    with pytest.raises(ValueError, match="Remove .shuffle"):
        ShardedStream(change(READ["iterable"](tmp_path)))


def test_unsupported_data(ranks, tmp_path):
    with pytest.raises(TypeError, match="whose shards are unknown. Use a Dataset or"):
        ShardedStream(range(5))
    with pytest.raises(ValueError, match="shards_at_once=4 and buffer=3"):
        ShardedStream("*.tar", buffer=3)
    write(tmp_path, "tar")
    with pytest.raises(ValueError, match="batch_size=None"):
        make_trainer("single").fit(Numbers(), DataLoader(ShardedStream(READ["tar"](tmp_path)), batch_size=None))
    for name in range(1, 6):
        (tmp_path / f"{name}.tar").unlink()
    with pytest.raises(RankError, match="1 shard.*fewer than the 2 data ranks"):
        ranks(fit, 2, tmp_path, "tar", 3, -1, 0, None, None)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    known=st.booleans(),
    read=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), max_size=5),
    micro=st.integers(1, 4),
    ranks=st.integers(1, 4),
    workers=st.integers(1, 3),
)
def test_remaining_pieces_are_dealt_once(sizes, known, read, micro, ranks, workers):
    done = [(shard, min(ends), max(ends)) for shard, *ends in read if shard < len(sizes)]
    left = Pieces(done).missing(range(len(sizes)), sizes if known else [UNKNOWN] * len(sizes))
    dealt = [[deal(left, micro, rank, ranks, worker, workers) for worker in range(workers)] for rank in range(ranks)]

    def samples(pieces: list[ShardPiece]) -> list[tuple[int, int]]:
        return [(shard, place) for shard, start, stop in pieces for place in range(start, min(stop, sizes[shard]))]

    wanted = {(shard, place) for shard, size in enumerate(sizes) for place in range(size)}
    wanted -= {(shard, place) for shard, start, stop in done for place in range(start, stop)}
    found = [samples(pieces) for by_worker in dealt for pieces in by_worker]
    assert Counter(sample for each in found for sample in each) == Counter(wanted)
    if known:
        by_rank = [[len(samples(pieces)) for pieces in by_worker] for by_worker in dealt]
        assert max(map(sum, by_rank)) - min(map(sum, by_rank)) <= 1
        assert all(sum(1 for size in sizes if size % micro) <= 1 for sizes in by_rank)
