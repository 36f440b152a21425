"""Samples read by each rank: their order depends on seed and epoch only, and each counts once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchmetrics import SumMetric

from tests.parity.harness import data_parallel_names, make_trainer

WORLD_SIZES = (1, 2, 4)
SEVERAL = [name for name in data_parallel_names() if name != "single"]
# (samples, micro-batch, accumulation) on one rank; the global batch is 12 throughout.
GLOBAL_BATCH = 12


class Numbers(Dataset):
    """``samples`` times ``{"index": (), "x": (2,)}``."""

    def __init__(self, samples: int) -> None:
        self.x = torch.arange(2.0 * samples).view(samples, 2) / samples

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int | list[int]) -> dict[str, Tensor]:
        return {"index": torch.tensor(index), "x": self.x[index]}


class Reader(pl.LightningModule):
    """Records the samples that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.counted = SumMetric()
        self.read: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
        self.logged: dict[str, float] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.read[self.current_epoch, self.trainer.global_step].append(batch["index"].tolist())
        return self.line(batch["x"]).square().mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        values = batch["index"].float()
        size = len(values)
        self.log("mean", values.mean(), batch_size=size)
        self.log("mean_synced", values.mean(), batch_size=size, sync_dist=True)
        self.log("sum", values.sum(), reduce_fx="sum")
        self.log("largest", values.max(), reduce_fx="max")
        self.log("smallest", values.min() - 100, reduce_fx="min")
        self.counted.update(torch.ones(size))
        self.log("counted", self.counted)

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return batch["index"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader_of(samples: int, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(Numbers(samples), batch_size=batch_size, **options)


# ---- Training -------------------------------------------------------------------------------------------------------


def read_in_training(
    strategy: str, samples: int, accumulation: int, epochs: int = 2, data_seed: int | None = 5, **options: Any
) -> dict[tuple[int, int], list[list[int]]]:
    """Return the micro-batches of this rank by (epoch, optimizer step)."""
    module = Reader()
    ranks = dist.get_world_size()
    loader = loader_of(samples, GLOBAL_BATCH // (ranks * accumulation), **options)
    trainer = make_trainer(strategy, global_batch_size=GLOBAL_BATCH, data_seed=data_seed, max_epochs=epochs)
    trainer.fit(module, loader)
    return dict(module.read)


def in_order(by_rank: list[dict[tuple[int, int], list[list[int]]]]) -> dict[tuple[int, int], list[int]]:
    """Return the samples of all ranks by (epoch, optimizer step), wave by wave."""
    return {
        step: [index for wave in zip(*(read[step] for read in by_rank), strict=True) for part in wave for index in part]
        for step in by_rank[0]
    }


def read_in_every_way(strategy: str) -> dict[tuple[int, bool], dict[tuple[int, int], list[list[int]]]]:
    """Return what this rank read by (accumulation, shuffle)."""
    return {
        (accumulation, shuffle): read_in_training(strategy, 48, accumulation, shuffle=shuffle)
        for accumulation in (1, 3)
        for shuffle in (False, True)
    }


def steps_of(ranks: Any, strategy: str, world_size: int, *args: Any, **kwargs: Any) -> dict[tuple[int, int], list[int]]:
    return in_order(ranks(read_in_training, world_size, strategy, *args, **kwargs))


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", SEVERAL)
def test_order_is_the_same_for_every_layout(ranks, strategy):
    by_size = [ranks(read_in_every_way, world_size, strategy) for world_size in WORLD_SIZES]
    for shuffle in (False, True):
        orders = [in_order([read[way] for read in each]) for each in by_size for way in each[0] if way[1] == shuffle]
        assert len(orders) == 6
        assert all(order == orders[0] for order in orders)
        assert list(orders[0]) == [(epoch, 4 * epoch + step) for epoch in range(2) for step in range(4)]
        for epoch in range(2):
            read = [index for step in range(4) for index in orders[0][epoch, 4 * epoch + step]]
            assert sorted(read) == list(range(48)), "every sample once"
            assert (read == list(range(48))) is not shuffle


def test_epochs_are_shuffled_differently_and_seeds_too(ranks):
    first = steps_of(ranks, "ddp", 2, 48, 1, shuffle=True)
    again = steps_of(ranks, "ddp", 2, 48, 1, shuffle=True)
    other = steps_of(ranks, "ddp", 2, 48, 1, shuffle=True, data_seed=6)
    assert first == again
    assert first != other
    assert [first[0, step] for step in range(4)] != [first[1, 4 + step] for step in range(4)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("samples", [37, 43, 47])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_uneven_data_is_read_to_the_end(ranks, samples, world_size):
    """All samples are read; only in the last wave may a rank repeat one."""
    by_rank = ranks(read_in_training, world_size, "ddp", samples, 3, epochs=1)
    steps = in_order(by_rank)
    read = [index for indices in steps.values() for index in indices]
    assert set(read) == set(range(samples))
    assert len(steps) == -(-samples // GLOBAL_BATCH)
    repeated = len(read) - samples
    assert 0 <= repeated < world_size
    assert len({tuple(len(waves) for waves in parts.values()) for parts in by_rank}) == 1, "as many waves on every rank"
    assert len(set(read[: samples - samples % GLOBAL_BATCH])) == samples - samples % GLOBAL_BATCH


def mean_logged_in_training(strategy: str, samples: int, batch_size: int) -> float:
    class Logging(Reader):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            self.log("mean", batch["index"].float().mean(), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(Logging(), loader_of(samples, batch_size))
    return trainer.callback_metrics["mean"].item()


@pytest.mark.parametrize("strategy", SEVERAL)
def test_epoch_means_logged_in_training_count_every_sample_once(ranks, strategy):
    # 25 samples in waves of 8: three ranks of four have none of the last.
    assert ranks(mean_logged_in_training, 4, strategy, 25, 2) == pytest.approx([12.0] * 4)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_drop_last_leaves_out_the_same_samples(ranks, world_size):
    steps = steps_of(ranks, "ddp", world_size, 43, 1, epochs=1, drop_last=True)
    assert [index for indices in steps.values() for index in indices] == list(range(36))


def test_worker_processes_do_not_change_the_order(ranks):
    assert steps_of(ranks, "ddp", 2, 36, 1, num_workers=1, shuffle=True) == steps_of(
        ranks, "ddp", 2, 36, 1, shuffle=True
    )


def trained_unevenly(strategy: str, samples: int) -> tuple[dict[tuple[int, int], list[list[int]]], list[Tensor]]:
    """Return what this rank read in steps of 8 samples, 2 at a time, and the final weights."""
    torch.manual_seed(0)
    module = Reader()
    trainer = make_trainer(strategy, global_batch_size=8, uneven_steps=True, data_seed=5, max_epochs=2)
    trainer.fit(module, loader_of(samples, 2, shuffle=True))
    assert trainer.global_batch.size == 8
    return dict(module.read), [value for _, value in sorted(trainer.strategy.whole_parameters())]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("samples", [24, 29])
def test_a_global_batch_that_three_ranks_cannot_share_evenly(ranks, reference, strategy, samples):
    alone, weights = reference(trained_unevenly, "single", samples)
    results = ranks(trained_unevenly, 3, strategy, samples)
    for step, batches in alone.items():
        own = [index for batch in batches for index in batch]
        read = [index for of_rank, _ in results for batch in of_rank[step] for index in batch]
        assert set(read) == set(own)
        # What a rank reads to take part in a step without a sample of its own counts for nothing, as the weights show.
        assert len(read) - len(own) in (0, 1, 2)
    for whole, expected in zip(results[0][1], weights, strict=True):
        torch.testing.assert_close(whole, expected, rtol=1e-6, atol=1e-7)


class Fours(BatchSampler):
    """A user's batch sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([i, i + 1, i + 2, i + 3] for i in range(0, 24, 4))


class OwnBatches(BatchSampler):
    """Batches like torch's, but of a user's class."""


def read_with_sampler(kind: str) -> dict[tuple[int, int], list[list[int]]]:
    module, data = Reader(), Numbers(24)
    ranks = dist.get_world_size()
    if kind == "weighted":
        weights = torch.arange(24.0)
        loader = DataLoader(data, batch_size=12 // ranks, sampler=WeightedRandomSampler(weights, num_samples=24))
    else:
        batches = BatchSampler(SequentialSampler(data), 12 // ranks, drop_last=False)
        if kind == "own bulk":  # a class of the user's own, in random order
            batches = OwnBatches(RandomSampler(data), 12 // ranks, drop_last=False)
        bulk = {"sampler": batches, "batch_size": None}
        loader = DataLoader(data, **({"batch_sampler": batches} if kind == "batches" else bulk))
    make_trainer("ddp", global_batch_size=12, data_seed=5, max_epochs=1).fit(module, loader)
    return dict(module.read)


@pytest.mark.parametrize("kind", ["weighted", "batches", "bulk", "own bulk"])
def test_a_sampler_of_the_users_own_is_dealt(ranks, kind):
    orders = [in_order(ranks(read_with_sampler, world_size, kind)) for world_size in WORLD_SIZES]
    assert orders[0] == orders[1] == orders[2]
    assert kind == "weighted" or sorted(index for indices in orders[0].values() for index in indices) == list(range(24))
    if kind in ("batches", "bulk"):
        assert [index for indices in orders[0].values() for index in indices] == list(range(24))


def trained_on_bulk(strategy: str, kind: str) -> list[Tensor]:
    """Return weights after steps of 12 samples, the last of which has fewer."""
    torch.manual_seed(0)
    data, ranks = Numbers(27 if kind == "single samples" else 29), dist.get_world_size()
    batches = OwnBatches(SequentialSampler(data), 2, drop_last=False)
    given = {"sampler": batches, "batch_size": None} if kind == "bulk" else {"batch_sampler": batches}
    options: dict[str, Any] = {"global_batch_size": 12}
    if kind == "single samples":  # one at a time
        given, options = {"batch_size": None}, {"accumulate_grad_batches": 12 // ranks}
    trainer = make_trainer(strategy, max_epochs=1, **options)
    trainer.fit(BulkReader(), DataLoader(data, **given))
    return [value for _, value in sorted(trainer.strategy.whole_parameters())]


class BulkReader(Reader):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.line(batch["x"]).square().mean()


@pytest.mark.parametrize("kind", ["bulk", "batches", "single samples"])
def test_the_last_step_of_whole_batches_is_a_mean_over_samples(ranks, reference, kind):
    expected = reference(trained_on_bulk, "single", kind)
    for weights in ranks(trained_on_bulk, 3, "ddp", kind):
        for whole, alone in zip(weights, expected, strict=True):
            torch.testing.assert_close(whole, alone, rtol=1e-6, atol=1e-7)


class Unrebuildable(DataLoader):
    """Keeps none of its arguments, and cuts its batches by itself."""

    def __init__(self, numbers: int, per_batch: int) -> None:
        data = Numbers(numbers)
        super().__init__(data, sampler=BatchSampler(SequentialSampler(data), per_batch, False), batch_size=None)


def read_unrebuildable(strategy: str, count: int) -> list[list[int]]:
    module = Reader()
    make_trainer(strategy, max_epochs=1, global_batch_size=4).fit(module, Unrebuildable(16, 4 // count))
    return [batch for batches in module.read.values() for batch in batches]


@pytest.mark.parametrize(("strategy", "count"), [("single", 1), ("ddp", 2)])
def test_a_loader_that_keeps_no_arguments(ranks, strategy, count):
    read = ranks(read_unrebuildable, count, strategy, count)
    steps = [sum((found[step] for found in read), []) for step in range(len(read[0]))]
    assert steps == [list(range(first, first + 4)) for first in range(0, 16, 4)]


def distributed_bulk() -> list[list[int]]:
    data, module = Numbers(16), Reader()
    sampler = DistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=False)
    loader = DataLoader(data, sampler=BatchSampler(sampler, 4, False), batch_size=None)
    make_trainer("ddp", max_epochs=1).fit(module, loader)
    return [batch for batches in module.read.values() for batch in batches]


def test_a_bulk_loader_with_a_distributed_sampler_is_used_as_it_is(ranks):
    assert ranks(distributed_bulk, 2) == [[[0, 2, 4, 6], [8, 10, 12, 14]], [[1, 3, 5, 7], [9, 11, 13, 15]]]


def seeded_bulk() -> str:
    data = Numbers(16)
    loader = DataLoader(data, sampler=BatchSampler(SequentialSampler(data), 4, False), batch_size=None)
    with pytest.raises(ValueError, match="seed_samples=True is not supported") as error:
        make_trainer("ddp", max_epochs=1, seed_samples=True).fit(Reader(), loader)
    return str(error.value)


def test_a_bulk_loader_with_seeded_samples_is_refused(ranks):
    assert "batch_size=None" in ranks(seeded_bulk, 1)[0]


class UnevenStream(IterableDataset):
    """Yields ``3 + r`` batches of two on rank r."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for i in range(2 * (3 + self.rank)):
            yield {"index": torch.tensor(100 * self.rank + i), "x": torch.full((2,), float(i))}


def read_stream(strategy: str) -> dict[str, Any]:
    module = Reader()
    stream = DataLoader(UnevenStream(dist.get_rank()), batch_size=2)
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(module, stream, val_dataloaders=DataLoader(UnevenStream(dist.get_rank()), batch_size=2))
    found = {"steps": trainer.global_step, "counted": trainer.callback_metrics["counted"].item()}
    predicted = trainer.predict(module, DataLoader(UnevenStream(dist.get_rank()), batch_size=2))
    return {**found, "predicted": sorted(torch.cat(predicted).tolist())}


@pytest.mark.parametrize("strategy", SEVERAL)
def test_a_rank_that_runs_out_does_not_hang_the_others(ranks, strategy):
    results = ranks(read_stream, 2, strategy, timeout=60)
    assert [r["steps"] for r in results] == [3, 3]
    assert [r["counted"] for r in results] == [6 + 8, 6 + 8]
    everything = [*range(6), *range(100, 108)]
    assert [r["predicted"] for r in results] == [everything, everything]


def refusal(samples: int, batch_size: int | None, **options: Any) -> str:
    """Return why data cannot be shared; without a batch size, in batches of the user's own."""
    data = Numbers(samples)
    batches: Any = {"batch_size": batch_size}
    if batch_size is None:
        batches = {"batch_sampler": Fours(SequentialSampler(data), 4, drop_last=False)}
    with pytest.raises(ValueError, match="global_batch_size=10|fewer than") as error:
        make_trainer("ddp", max_epochs=1, **options).fit(Reader(), DataLoader(data, **batches))
    return str(error.value)


@pytest.mark.parametrize(
    ("world_size", "arguments", "options", "words"),
    [
        (1, (24, None), {"global_batch_size": 10, "uneven_steps": True}, "global_batch_size=10 cannot be made"),
        (4, (3, 1), {}, "3 sample(s), fewer than the 4 data ranks"),
        (4, (3, 1), {}, "devices=3"),
        (2, (48, 4), {"global_batch_size": 10}, "Nearest possible: global_batch_size=8 or 16"),
    ],
)
def test_samples_that_cannot_be_shared_are_refused(ranks, world_size, arguments, options, words):
    assert words in ranks(refusal, world_size, *arguments, **options)[0]


# ---- Evaluation and prediction --------------------------------------------------------------------------------------


# (samples, batch size)
SIZES = [(12, 3), (23, 3), (5, 2), (2, 4), (1, 1)]
# Which samples a rank reads does not ask for the strategy: off two ranks, sizes take turns.
EVALUATED = [
    (strategy, world_size, [size for place, size in enumerate(SIZES) if world_size == 2 or place % 2 == turn])
    for turn, strategy in enumerate(("ddp", "zero3"))
    for world_size in WORLD_SIZES
]


def evaluate_all(strategy: str, sizes: list[tuple[int, int]]) -> list[dict[str, dict[str, float]]]:
    return [evaluate(strategy, *size) for size in sizes]


def evaluate(strategy: str, samples: int, batch_size: int) -> dict[str, dict[str, float]]:
    module = Reader()
    trainer = make_trainer(strategy, max_epochs=1)
    found = {
        "validate": trainer.validate(module, loader_of(samples, batch_size), verbose=False)[0],
        "test": trainer.test(module, loader_of(samples, batch_size), verbose=False)[0],
    }
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(module, loader_of(24, 2), loader_of(samples, batch_size))
    found["fit"] = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(("strategy", "world_size", "sizes"), EVALUATED)
def test_evaluation_counts_every_sample_once(ranks, strategy, world_size, sizes):
    for rank, found in enumerate(ranks(evaluate_all, world_size, strategy, sizes)):
        for (samples, batch_size), stages in zip(sizes, found, strict=True):
            mean = (samples - 1) / 2
            expected = {"mean": mean, "mean_synced": mean, "sum": sum(range(samples))}
            expected |= {"largest": samples - 1, "smallest": -100, "counted": samples}
            for stage, values in stages.items():
                assert values == pytest.approx(expected, rel=1e-6), (rank, samples, batch_size, stage)


def predict_all(strategy: str, sizes: list[tuple[int, int]]) -> list[list[int]]:
    return [torch.cat(make_trainer(strategy).predict(Reader(), loader_of(*size))).tolist() for size in sizes]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("strategy", "world_size", "sizes"), EVALUATED)
def test_predict_returns_every_sample_once_in_order(ranks, strategy, world_size, sizes):
    everything = [list(range(samples)) for samples, _ in sizes]
    assert ranks(predict_all, world_size, strategy, sizes) == [everything] * world_size


def predict_twice(strategy: str) -> list[list[int]]:
    trainer = make_trainer(strategy)
    loaders = [loader_of(7, 2), loader_of(4, 2)]
    return [torch.cat(batches).tolist() for batches in trainer.predict(Reader(), loaders)]


def test_predict_keeps_loaders_apart(ranks):
    assert ranks(predict_twice, 2, "ddp") == [[list(range(7)), list(range(4))]] * 2
