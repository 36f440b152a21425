"""A run resumed with other ranks, batch sizes and workers reads each sample of the epoch once."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.parity.harness import Saver, make_trainer, world_size
from trainwright import DealtStream, ShardedStream
from trainwright.trainer.data.reading import dealer_of
from trainwright.trainer.data.streams.sources import IndexedShards

GLOBAL_BATCH = 12
SAMPLES = 43  # three steps of twelve samples and one of seven


class Numbers(Dataset):
    """``{"index": ()}``."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index)}


class OtherNumbers(Numbers):
    """Another class."""


class OwnBatches(BatchSampler):
    """A batch sampler whose samples cannot be distributed one by one."""


class Noisy(Numbers):
    """Samples with noise of every generator."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return {"index": torch.tensor(index), "noise": noise.double()}


class Reader(pl.LightningModule):
    """Records what it reads: (loader, epoch) -> indices, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.read: dict[tuple[Any, int], list[int]] = defaultdict(list)
        self.steps: dict[int, list[int]] = defaultdict(list)
        self.noise: dict[tuple[int, int], float] = {}
        self.hooks: list[tuple[str, int]] = []
        self.batch_indices: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batch_indices.append(batch_idx)
        parts = batch if set(batch) - {"index", "noise"} else {None: batch}
        for (name, part), loader in zip(parts.items(), self.trainer.fit_loop._combined_loader.flattened, strict=True):
            dealer = dealer_of(loader)
            if part is None or (len(parts) == 1 and dealer is not None and dealer.is_padding(batch_idx)):
                continue
            indices = part["index"].tolist()
            self.read[name, self.current_epoch] += indices
            self.steps[self.global_step] += indices
            for index, noise in zip(indices, part.get("noise", torch.zeros(len(indices))).tolist(), strict=True):
                self.noise[self.current_epoch, index] = noise
        # The mean over samples of the step, as gradient: exact only if losses are weighed so.
        return sum(self.weight * part["index"].float().mean() for part in parts.values() if part is not None)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_epoch_start(self) -> None:
        self.hooks.append(("start", self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.hooks.append(("end", self.current_epoch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@dataclass
class Leg:
    """One run of several, each of which resumes the one before.

    Args:
        ranks: world size.
        micro: samples per rank and wave.
        stop: optimizer steps in all when it ends; ``None`` ends after ``epochs``.
        epochs: epochs in all.
        workers: of the loaders.
        save: ``"after"`` fit, or at ``"batch"`` or ``"validation"`` ends.
        options: of the Trainer.
        loaders: of :func:`build`.
    """

    ranks: int = 1
    micro: int = 12
    stop: int | None = None
    epochs: int = 2
    workers: int = 0
    save: str = "after"
    options: dict[str, Any] = field(default_factory=dict)
    loaders: dict[str, Any] = field(default_factory=dict)


def build(leg: Leg, kind: str = "map", samples: int = SAMPLES, shuffle: bool = True, data: type = Numbers) -> Any:
    options: dict[str, Any] = {"num_workers": leg.workers, "persistent_workers": leg.workers > 0}
    if kind in ("map", "stateful map"):
        loader = DataLoader if kind == "map" else StatefulDataLoader
        return loader(data(samples), batch_size=leg.micro, shuffle=shuffle, **options)
    if kind == "batches":
        numbers = data(samples)
        return DataLoader(numbers, batch_sampler=OwnBatches(RandomSampler(numbers), leg.micro, False), **options)
    if kind in ("stream", "skipping stream"):
        lines = Lines if kind == "stream" else SkippingLines
        return DataLoader(DealtStream(lines(samples)), batch_size=leg.micro, **options)
    if kind == "stateful stream":
        return StatefulDataLoader(Shard(samples), batch_size=leg.micro, **options)
    if kind == "stateful data":
        return DataLoader(data(samples), batch_size=leg.micro)
    loaders = {"a": build(leg, "map", samples, shuffle), "b": build(leg, "map", samples // 2, shuffle)}
    return CombinedLoader(loaders, kind)


class Lines:
    """A stream that can be read again."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = random.Random(self.epoch).sample(range(self.samples), self.samples)
        return ({"index": torch.tensor(index)} for index in order)


class SkippingLines(Lines):
    """A stream with a ``skip`` of its own."""

    def skip(self, samples: int) -> list[dict[str, Tensor]]:
        assert samples > 0
        return list(self)[samples:]


class Shard(IterableDataset):
    """Yields every n-th number on rank r of n, and every m-th of those in worker w of m; stateful."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.done = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (RANK, RANKS)
        mine = range(self.samples)[rank::ranks][first::step]
        while self.done < len(mine):
            self.done += 1
            yield {"index": torch.tensor(mine[self.done - 1])}
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class SharedShard(Shard):
    """Redistributes states over ranks that had all read equally far."""

    def load_state_dicts(self, states: list[dict[str, int]], rank: int, ranks: int) -> None:
        self.done = sum(state["done"] for state in states) // ranks


RANK, RANKS = 0, 1


def run(leg: Leg, resume: str | None, save: str | None, loaders: Any = None, callbacks: tuple[Any, ...] = ()) -> Reader:
    global RANK, RANKS
    RANK, RANKS = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    module = Reader()
    saver = [Saver(save, leg.save, leg.stop)] if save and leg.stop and leg.save != "after" else []
    options: dict[str, Any] = {"global_batch_size": GLOBAL_BATCH, "data_seed": 5, "enable_checkpointing": bool(saver)}
    trainer = make_trainer(
        "ddp" if world_size() > 1 else "single",
        max_steps=-1 if leg.stop is None else leg.stop,
        max_epochs=leg.epochs,
        callbacks=[*saver, *callbacks],
        **{**options, **leg.options},
    )
    validation = DataLoader(Numbers(4), batch_size=2) if leg.save == "validation" else None
    trainer.fit(module, build(leg, **leg.loaders) if loaders is None else loaders, validation, ckpt_path=resume)
    if save and leg.save == "after":
        trainer.save_checkpoint(save)
    module.found = {  # type: ignore[assignment]
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "weight": module.weight.item(),
        "stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "batches": trainer.fit_loop.epoch_loop.batch_progress.current.ready,
    }
    return module


def on_rank(leg: Leg, resume: str | None, save: str | None) -> dict[str, Any]:
    module = run(leg, resume, save)
    names = ("read", "steps", "noise", "hooks", "batch_indices", "found")
    return {name: dict(v) if isinstance(v := getattr(module, name), dict) else v for name in names}


def legs_of(*legs: Leg, **shared: Any) -> list[Leg]:
    """Return legs with shared attributes."""
    return [replace(leg, **shared) for leg in legs]


def run_legs(ranks: Callable[..., list[Any]], folder: Path, legs: list[Leg]) -> list[list[dict[str, Any]]]:
    """Run legs one after the other; return the records of each rank of each leg."""
    found, path = [], None
    for number, leg in enumerate(legs):
        save = str(folder / f"leg{number}.ckpt") if number < len(legs) - 1 else None
        found.append(ranks(on_rank, leg.ranks, leg, path, save, init_group=leg.ranks > 1, timeout=90))
        path = save
    return found


def counts(found: list[list[dict[str, Any]]], name: Any = None) -> dict[int, Counter[int]]:
    """Return by epoch how often each sample was read, over all legs and ranks."""
    read: dict[int, Counter[int]] = defaultdict(Counter)
    for records in found:
        for record in records:
            for (loader, epoch), indices in record["read"].items():
                if loader == name:
                    read[epoch].update(indices)
    return read


def once(samples: int = SAMPLES, epochs: int = 2) -> dict[int, Counter[int]]:
    return {epoch: Counter(range(samples)) for epoch in range(epochs)}


# ---- Map-style data -------------------------------------------------------------------------------------------------

# Two ranks stop within the first epoch, three within the second, one ends it.
MOVES = [Leg(2, 3, stop=2), Leg(3, 2, stop=6), Leg(1, 4)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("partition", ["interleave", "range", "hash"])
@pytest.mark.parametrize("save", ["after", "batch"])
def test_each_sample_is_read_once_by_changing_ranks(ranks, tmp_path, partition, save):
    legs = legs_of(*MOVES, save=save, options={"data_partition": partition})
    found = run_legs(ranks, tmp_path, legs)
    assert counts(found) == once()
    steps = [records[0]["found"]["step"] for records in found]
    if partition == "interleave":
        assert steps == [2, 6, 8]
        whole = run_legs(ranks, tmp_path, [Leg()])[0][0]
        assert found[-1][0]["found"]["weight"] == pytest.approx(whole["found"]["weight"])
        assert found[-1][0]["found"]["stepped"] == whole["found"]["stepped"]
        for records in found:
            # The first micro-batch of a leg has the number of steps of its epoch, times its own accumulation.
            for step in records[0]["steps"]:
                together = sorted(index for record in records for index in record["steps"][step])
                assert together == sorted(whole["steps"][step])
        assert [records[0]["batch_indices"][0] for records in found] == [0, 2 * 2, 2 * 3]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["map", "stateful map", "batches"])
def test_each_sample_is_read_once_by_changing_workers(ranks, tmp_path, kind):
    legs = legs_of(Leg(2, 3, stop=2, workers=2), Leg(1, 6, stop=5), Leg(2, 2, workers=1), loaders={"kind": kind})
    assert counts(run_legs(ranks, tmp_path, legs)) == once()


@pytest.mark.parametrize("save", ["after", "batch", "validation"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_saved_at_the_end_of_an_epoch_continues_with_the_next(ranks, tmp_path, save, workers):
    legs = [Leg(2, 3, stop=4, save=save), Leg(1, 4, workers=workers, save=save)]
    found = run_legs(ranks, tmp_path, legs)
    assert counts(found) == once()
    hooks = found[1][0]["hooks"]
    # Saved within the last batch or after the validation, the end of the epoch is still to come.
    assert hooks == [*([] if save == "after" else [("end", 0)]), ("start", 1), ("end", 1)]
    assert found[1][0]["found"] | {"weight": 0} == {"step": 8, "epoch": 2, "stepped": 8, "batches": 11, "weight": 0}


def test_a_save_within_a_step_reads_its_samples_again(ranks, tmp_path):
    class SaveWithinStep(pl.Callback):
        def on_train_batch_end(
            self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 4:  # the second of three micro-batches of step 1
                trainer.save_checkpoint(str(tmp_path / "within.ckpt"))

    whole = run(Leg(micro=4, epochs=1), None, None, callbacks=(SaveWithinStep(),))
    resumed = run(Leg(micro=3, epochs=1), str(tmp_path / "within.ckpt"), None)
    assert dict(resumed.steps) == {step: read for step, read in whole.steps.items() if step >= 1}
    assert resumed.batch_indices[0] == 4
    assert resumed.found["weight"] == pytest.approx(whole.found["weight"])
    assert resumed.found | {"weight": 0} == whole.found | {"batches": 15, "weight": 0}


def test_seeded_samples_are_the_same_everywhere(ranks, tmp_path):
    shared: dict[str, Any] = {"options": {"seed_samples": True}, "loaders": {"data": Noisy}}
    [[whole]] = run_legs(ranks, tmp_path, [Leg(**shared)])
    legs = legs_of(Leg(2, 3, stop=2, workers=1), Leg(1, 4, workers=2), **shared)
    noise: dict[Any, float] = {}
    for records in run_legs(ranks, tmp_path, legs):
        for record in records:
            noise.update(record["noise"])
    assert noise == whole["noise"]
    assert len(set(noise.values())) == 2 * SAMPLES, "another noise for each sample and epoch"
    [[plain]] = run_legs(ranks, tmp_path, [Leg(loaders={"data": Noisy})])
    assert plain["noise"] != whole["noise"]


# ---- Several loaders ------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_several_loaders_resume_together(ranks, tmp_path, mode):
    # 48 and 24 samples, so no batch is padding.
    first, second = (1, 3) if mode == "min_size" else (3, 5)
    legs = [Leg(2, 3, stop=first), Leg(1, 4, stop=second, workers=int(mode != "min_size")), Leg(3, 2)]
    legs = legs_of(*legs, loaders={"kind": mode, "samples": 48})
    found = run_legs(ranks, tmp_path, legs)
    long, short = counts(found, "a"), counts(found, "b")
    if mode == "min_size":
        assert {epoch: sum(read.values()) for epoch, read in long.items()} == {0: 24, 1: 24}
        assert all(count == 1 for read in long.values() for count in read.values())
    else:
        assert long == once(48)
    cycles = 2 if mode == "max_size_cycle" else 1
    assert short == {epoch: Counter(dict.fromkeys(range(24), cycles)) for epoch in range(2)}


def test_loaders_that_cannot_be_combined_are_refused():
    loaders = {"a": DataLoader(Numbers(24), batch_size=4), "b": DataLoader(Numbers(24), batch_size=6)}
    with pytest.raises(ValueError, match="needs 3 accumulated micro-batches for one training loader and 2 for another"):
        run(Leg(), None, None, loaders=loaders)
    with pytest.raises(ValueError, match='does not support the `CombinedLoader\\(mode="sequential"\\)`'):
        run(Leg(), None, None, loaders=CombinedLoader([DataLoader(Numbers(24), batch_size=4)], "sequential"))
    shards = DataLoader(ShardedStream(IndexedShards(Numbers(24), [12, 12]), shuffle=False), batch_size=4)
    with pytest.raises(ValueError, match="which is read once in an epoch. Allowed: max_size, min_size"):
        run(Leg(), None, None, loaders={"a": loaders["a"], "b": shards})


# ---- Streams and loaders that keep a state --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stream", "skipping stream"])
def test_a_stream_resumes_under_any_ranks_and_workers(ranks, tmp_path, kind):
    loaders = {"kind": kind}
    legs = [Leg(2, 3, stop=2, workers=2), Leg(3, 2, stop=6), Leg(1, 4, workers=1)]
    found = run_legs(ranks, tmp_path, legs_of(*legs, loaders=loaders))
    assert counts(found) == once()
    # The last step of an epoch has seven samples; its gradient is their mean all the same.
    [[whole]] = run_legs(ranks, tmp_path, [Leg(loaders=loaders)])
    assert found[-1][0]["found"]["weight"] == pytest.approx(whole["found"]["weight"])
    assert found[-1][0]["found"]["step"] == whole["found"]["step"] == 8


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "workers"), [("stateful stream", 0), ("stateful stream", 2), ("stateful data", 0)])
@pytest.mark.parametrize("stop", [2, 4])
def test_a_stateful_loader_gets_the_state_of_its_own_rank_back(ranks, tmp_path, kind, workers, stop):
    loaders = {"kind": kind, "samples": 48}
    legs = [Leg(2, 3, stop=stop, workers=workers, save=save, loaders=loaders) for save in ("after", "batch")]
    for leg in legs:
        last = Leg(2, 3, workers=workers, loaders=loaders)
        assert counts(run_legs(ranks, tmp_path, [leg, last])) == once(48)


def refuse_states(path: str, micro: int, workers: int) -> str:
    loader = StatefulDataLoader(Shard(48), batch_size=micro, num_workers=workers)
    with pytest.raises(ValueError, match="keeps a state of its own") as error:
        run(Leg(), path, None, loaders=loader)
    return str(error.value)


def share_states(path: str) -> list[int]:
    return run(Leg(epochs=1), path, None, loaders=DataLoader(SharedShard(48), batch_size=6)).read[None, 0]


def test_states_of_other_ranks_or_workers_are_refused(ranks, tmp_path):
    loaders = {"kind": "stateful stream", "samples": 48}
    run_legs(ranks, tmp_path, legs_of(Leg(2, 3, stop=2), Leg(2, 3, epochs=1), loaders=loaders))
    path = str(tmp_path / "leg0.ckpt")
    [message] = ranks(refuse_states, 1, path, 6, 0, init_group=False)
    assert "saved with 2 data ranks, now 1" in message
    assert "Resume with 2 data ranks" in message
    message = ranks(refuse_states, 2, path, 3, 1)[1]
    assert "saved with num_workers=0, now 1" in message


def test_a_loader_may_redistribute_states(ranks, tmp_path):
    loaders = {"kind": "stateful data", "samples": 48, "data": SharedShard}
    run_legs(ranks, tmp_path, [Leg(2, 3, stop=2, loaders=loaders), Leg(2, 3, epochs=1, loaders=loaders)])
    path = str(tmp_path / "leg0.ckpt")
    [read] = ranks(share_states, 1, path, init_group=False)
    assert read == list(range(24, 48))


# ---- Changed data ---------------------------------------------------------------------------------------------------


def saved(folder: Path, **options: Any) -> str:
    path = str(folder / "saved.ckpt")
    run(Leg(stop=2, options=options), None, path)
    return path


@pytest.mark.parametrize(
    ("options", "loaders", "told"),
    [
        ({"global_batch_size": 24}, {}, ["had 12 samples when saved, now it has 24", "Type global_batch_size=12"]),
        ({}, {"samples": 44}, ["the length of the data set was 43 when saved, now it is 44"]),
        ({}, {"data": OtherNumbers}, ["the class of the data set was 'Numbers' when saved, now it is 'OtherNumbers'"]),
        ({"data_seed": 6}, {}, ["drawn from seed 5 when saved, now it is drawn from seed 6", "Type data_seed=5"]),
        ({}, {"shuffle": False}, ["drawn from seed 5 when saved, now it is not shuffled"]),
        (
            {"data_partition": "hash"},
            {},
            ["'interleave' when saved, now it is 'hash'", "Type data_partition=interleave"],
        ),
        ({}, {"kind": "stream"}, ["one over a map-style data set when saved, now it is one over a DealtStream"]),
        ({}, {"kind": "max_size"}, ["saved with 1 training loader(s), now there are 2"]),
    ],
)
def test_changed_data_are_refused(tmp_path, options, loaders, told):
    path = saved(tmp_path)
    with pytest.raises(ValueError, match="would not resume in the data where the checkpoint stopped") as error:
        run(Leg(options=options, loaders=loaders), path, None)
    for text in (*told, "allow_changed_data=True"):
        assert text in str(error.value)
    with pytest.warns(UserWarning, match="Resuming with changed data"):
        run(Leg(options={**options, "allow_changed_data": True}, loaders=loaders), path, None)


def test_another_effective_batch_is_refused_without_a_global_batch(tmp_path):
    path = saved(tmp_path, global_batch_size=None)
    with pytest.raises(ValueError, match="Type global_batch_size=12"):
        run(Leg(micro=6, options={"global_batch_size": None}), path, None)
    run(Leg(micro=6, options={"global_batch_size": None, "accumulate_grad_batches": 2}), path, None)
    run(Leg(micro=3), path, None)


def test_a_fingerprint_is_compared(tmp_path):
    def loader(fingerprint: str) -> DataLoader:
        data = Numbers(SAMPLES)
        data._fingerprint = fingerprint  # type: ignore[attr-defined]
        return DataLoader(data, batch_size=12)

    path = str(tmp_path / "saved.ckpt")
    run(Leg(stop=2), None, path, loaders=loader("one"))
    with pytest.raises(ValueError, match="the fingerprint of the data set was 'one' when saved, now it is 'two'"):
        run(Leg(), path, None, loaders=loader("two"))


@pytest.mark.parametrize(
    "options",
    [
        {"global_batch_size": 5},
        {"global_batch_size": 30},
        {"data_seed": 6},
        {"data_partition": "range"},
        {"data_partition": "hash", "global_batch_size": 3},
    ],
)
def test_allowed_changes_of_data_still_read_each_sample_once(tmp_path, options):
    path = str(tmp_path / "saved.ckpt")
    first = run(Leg(stop=2), None, path)
    micro = options.get("global_batch_size", 12)
    rest = run(Leg(micro=micro, options={**options, "allow_changed_data": True}), path, None)
    assert sorted(first.read[None, 0] + rest.read[None, 0]) == list(range(SAMPLES))
    assert sorted(rest.read[None, 1]) == list(range(SAMPLES))
    # The epoch after has its own length again.
    assert rest.found["batches"] == -(-SAMPLES // micro)
    assert rest.hooks == [("end", 0), ("start", 1), ("end", 1)]


def test_the_schedule_of_accumulation_counts(tmp_path):
    path = str(tmp_path / "saved.ckpt")
    options = {"global_batch_size": None}
    schedule = lambda: (GradientAccumulationScheduler({0: 1, 1: 2}),)  # noqa: E731
    run(Leg(micro=4, stop=13, options=options), None, path, callbacks=schedule())
    rest = run(Leg(micro=4, options=options), path, None, callbacks=schedule())
    assert sorted(rest.read[None, 1])[0] >= 0
    assert len(rest.read[None, 1]) == SAMPLES - 2 * 8
    assert rest.found["step"] == 11 + 6


# ---- Options and refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"data_partition": "modulo"}, "allowed: 'interleave', 'range', 'hash'"),
        ({"data_key": print}, "which asks for no key"),
        ({"data_partition": "hash", "data_key": "nowhere:at_all"}, "cannot be found"),
        (
            {
                "data_partition": "range",
                "global_batch_size": None,
                "callbacks": [GradientAccumulationScheduler({0: 2})],
            },
            "GradientAccumulationScheduler together with data_partition='range'",
        ),
    ],
)
def test_impossible_options_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        make_trainer("single", **options)


@pytest.mark.parametrize("options", [{"data_partition": "hash"}, {"seed_samples": True}])
@pytest.mark.parametrize("kind", ["stream", "stateful stream"])
def test_options_that_a_stream_cannot_have_are_refused(options, kind):
    with pytest.raises(ValueError, match="is not supported with this training loader"):
        run(Leg(options=options, loaders={"kind": kind}), None, None)


def test_batches_of_the_users_own_are_not_partitioned():
    with pytest.raises(ValueError, match="has a batch sampler of its own"):
        run(Leg(options={"data_partition": "range"}, loaders={"kind": "batches"}), None, None)


def group_of(dataset: Numbers, index: int) -> str:
    return f"{type(dataset).__name__} {index // 8}"


def read_by_key() -> list[int]:
    module = run(Leg(micro=6, options={"data_partition": "hash", "data_key": group_of}), None, None)
    return sorted(set(module.read[None, 0]) | set(module.read[None, 1]))


def test_samples_of_one_key_are_read_by_one_rank(ranks):
    by_rank = ranks(read_by_key, 2)
    groups = [{index // 8 for index in read} for read in by_rank]
    assert groups[0].isdisjoint(groups[1])
    assert sorted(by_rank[0] + by_rank[1]) == list(range(SAMPLES))


def test_estimated_steps_do_not_lose_the_place(tmp_path):
    class Estimating(Reader):
        def configure_optimizers(self) -> Any:
            self.estimated = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    path = saved(tmp_path)
    module = Estimating()
    trainer = make_trainer("single", global_batch_size=GLOBAL_BATCH, data_seed=5, max_epochs=1)
    trainer.fit(module, DataLoader(Numbers(SAMPLES), batch_size=4, shuffle=True, num_workers=1), ckpt_path=path)
    assert module.estimated == 4
    assert len(module.read[None, 0]) == SAMPLES - 24
    assert len(set(module.read[None, 0])) == SAMPLES - 24


def test_a_checkpoint_of_model_checkpoint_is_resumed(tmp_path):
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run(Leg(options={"enable_checkpointing": True}), None, None, callbacks=(saver,))
    for step in (1, 3, 4, 5, 7):
        rest = run(Leg(micro=6), str(tmp_path / f"step={step}.ckpt"), None)
        assert dict(rest.steps) == {at: read for at, read in whole.steps.items() if at >= step}
        assert rest.found["weight"] == pytest.approx(whole.found["weight"])
