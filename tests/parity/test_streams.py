"""Streams: each sample is read once, and ranks of one replica read the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info
from torchmetrics import SumMetric

from tests.parity.harness import make_trainer
from tests.parity.layout_modules import LENGTH, LanguageModel
from tests.parity.layouts import Texts
from trainwright import ShardedStream
from trainwright.trainer.data.streams.sources import IndexedShards

ON_TWO: dict[str, dict[str, Any]] = {
    "ddp": {},
    "tensor": {"tensor": 2, "shard": 1},
    "pipeline": {"pipeline": 2, "shard": 1},
}
ON_FOUR = {"tensor": 2, "shard": 2}
TEXTS = Texts(25).tokens.tolist()


class Stream(IterableDataset):
    """All texts, or every n-th by rank and world size; without a length."""

    def __init__(self, splits: bool = False, samples: int = 25) -> None:
        self.splits, self.texts = splits, Texts(samples)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if self.splits else (0, 1)
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in list(range(len(self.texts)))[rank::ranks][first::step]:
            yield self.texts[index]


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.texts)


class RandomStream(Stream):
    """The same first batch on every rank, and others later."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        yield from (self.texts[index] for index in range(2))
        while True:
            yield self.texts[int(torch.randint(25, (), generator=generator))]


def sharded(splits: bool, samples: int) -> ShardedStream:
    """Return the texts in shards of three, in order."""
    texts = Texts(samples)
    sizes = [min(3, samples - first) for first in range(0, samples, 3)]
    return ShardedStream(IndexedShards(texts, sizes), shuffle=False)


class Reads(LanguageModel):
    """Records what it reads; its gradient is the mean over samples."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__("gpt-untied")
        self.read: list[list[int]] = []
        self.listed: list[Tensor] = []
        self.counted = SumMetric()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.read.extend(batch["tokens"].tolist())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.counted.update(len(batch["tokens"]))
        self.listed.append(batch["tokens"])
        self.log("val_loss", self.loss(batch), batch_size=len(batch["tokens"]))

    def on_validation_epoch_end(self) -> None:
        self.log("counted", self.counted.compute())
        self.counted.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch["tokens"]


def read(strategy: str, options: dict[str, Any], make: Any, splits: bool, micro: int, workers: int) -> dict[str, Any]:
    module = Reads()
    trainer = make_trainer(strategy, options, max_epochs=1, val_check_interval=1.0)

    def load(samples: int) -> DataLoader:
        return DataLoader(make(splits, samples), batch_size=micro, num_workers=workers)

    trainer.fit(module, load(25), load(9))
    return {
        "read": module.read,
        "data_rank": trainer.strategy.ranks.data_rank,
        "listed": torch.cat(module.listed).tolist(),
        "steps": trainer.global_step,
        "weights": [weight.norm().item() for _, weight in trainer.strategy.whole_parameters()],
        **{name: value.item() for name, value in trainer.callback_metrics.items()},
        "predicted": torch.cat(trainer.predict(module, load(9))).tolist(),
    }


def _check(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    leaders = list({result["data_rank"]: result for result in results}.values())
    for result in results:
        same = next(leader for leader in leaders if leader["data_rank"] == result["data_rank"])
        assert result["read"] == same["read"]
        assert result["steps"] == alone["steps"]
        assert result["counted"] == 9
        assert result["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-5)
        assert result["weights"] == pytest.approx(alone["weights"], rel=1e-5)
        assert result["predicted"] == alone["predicted"]
    assert sorted(text for leader in leaders for text in leader["listed"]) == sorted(TEXTS[:9])


@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
def test_a_stream_that_all_ranks_read_is_trained_on_once(ranks: Any, reference: Any, strategy: str) -> None:
    data_ranks = 2 if strategy == "ddp" else 1
    alone = reference(read, "single", {}, Stream, False, 4, 0, init_group=False)
    _check(ranks(read, 2, strategy, ON_TWO[strategy], Stream, False, 4 // data_ranks, 0), alone)


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
def test_ranks_that_share_samples_read_the_same_shards(ranks: Any, reference: Any, strategy: str) -> None:
    alone = reference(read, "single", {}, sharded, False, 4, 0, init_group=False)
    assert alone["read"] == TEXTS
    _check(ranks(read, 2, strategy, ON_TWO[strategy], sharded, False, 4, 0), alone)


@pytest.mark.thorough
def test_shards_under_a_hybrid(ranks: Any, reference: Any) -> None:
    alone = reference(read, "single", {}, sharded, False, 4, 0, init_group=False)
    results = ranks(read, 4, "hybrid", ON_FOUR, sharded, False, 2, 0)
    read_by = {result["data_rank"]: result["read"] for result in results}
    assert all(result["read"] == read_by[result["data_rank"]] for result in results)
    # Each data rank has its part; the one that has less repeats its last batch as padding.
    assert read_by == {0: TEXTS[:12] + TEXTS[10:12], 1: TEXTS[12:]}
    for result in results:
        assert result["counted"] == 9
        assert result["predicted"] == alone["predicted"]


@pytest.mark.thorough
@pytest.mark.parametrize(("splits", "workers"), [(False, 2), (True, 0)])
def test_streams_under_a_hybrid(ranks: Any, splits: bool, workers: int) -> None:
    results = ranks(read, 4, "hybrid", ON_FOUR, Stream, splits, 2, workers)
    read_by = {result["data_rank"]: result["read"] for result in results}
    assert all(result["read"] == read_by[result["data_rank"]] for result in results)
    # Padding is read too, with weight zero; a stream split by rank ends with the shortest part.
    everything = sorted(map(tuple, TEXTS if not splits else TEXTS[:24]))
    assert sorted({tuple(text) for texts in read_by.values() for text in texts}) == everything
    assert [result["counted"] for result in results] == [9] * 4


def said(make: Any, strategy: str, options: dict[str, Any], loader: Any = None) -> str:
    trainer = make_trainer(strategy, options, max_epochs=1, use_distributed_sampler=loader is None)
    data = DataLoader(make(), batch_size=2) if loader is None else loader()
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer.fit(Reads(), data)
    return str(error.value)


def split_by_sampler() -> DataLoader:
    return DataLoader(Texts(24), batch_size=2, sampler=DistributedSampler(Texts(24)))


def split_by_rank() -> DataLoader:
    data = Texts(24)
    data.tokens = data.tokens[dist.get_rank() :: dist.get_world_size()]
    return DataLoader(data, batch_size=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "strategy", "loader", "message"),
    [
        (SizedStream, "ddp", None, "gives all 2 data ranks the same samples"),
        (RandomStream, "ddp", None, "the same first batch, but different ones later"),
        (None, "tensor", split_by_sampler, "share their samples, but their first training batches differ"),
        (None, "pipeline", split_by_rank, "share their samples, but their first training batches differ"),
    ],
)
def test_wrong_samples_are_refused(ranks: Any, make: Any, strategy: str, loader: Any, message: str) -> None:
    for error in ranks(said, 2, make, strategy, ON_TWO[strategy], loader):
        assert message in error
        assert "trainer.strategy.ranks.data_rank" in error


class GathersUnevenly(Reads):
    def on_validation_epoch_end(self) -> None:
        self.all_gather(torch.cat(self.listed))


def gather_unevenly() -> str:
    with pytest.raises(ValueError, match="all_gather") as error:
        make_trainer("ddp").validate(GathersUnevenly(), DataLoader(Texts(5), batch_size=2), verbose=False)
    return str(error.value)


def test_a_gather_of_unequal_shapes_is_refused(ranks: Any) -> None:
    for message in ranks(gather_unevenly, 2):
        assert f"(3, {LENGTH + 1}) (torch.int64) on rank 0, (2, {LENGTH + 1})" in message
        assert "gather_all_tensors" in message


class Writer(BasePredictionWriter):
    """Writes to one file for each rank, and waits for the others."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: dict[str, list[Any]] = {"batch": [], "epoch": [], "indices": []}

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *_: Any) -> None:
        trainer.strategy.barrier()
        self.written["batch"] += prediction.tolist()

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        trainer.strategy.barrier()
        self.written["epoch"] += torch.cat(list(predictions)).tolist()
        self.written["indices"] += [index for batch in indices[0] for index in batch]


def write(options: dict[str, Any]) -> dict[str, list[Any]]:
    writer = Writer()
    trainer = make_trainer("hybrid", options, callbacks=[writer])
    trainer.predict(Reads(), DataLoader(Texts(7), batch_size=2), return_predictions=False)
    return writer.written


@pytest.mark.parametrize("options", [ON_FOUR, {"pipeline": 2, "shard": 2}])
def test_each_prediction_is_written_once(ranks: Any, options: dict[str, Any]) -> None:
    results = ranks(write, 4, options)
    for kind in ("batch", "epoch"):
        assert sorted(text for result in results for text in result[kind]) == sorted(TEXTS[:7])
    assert sorted(index for result in results for index in result["indices"]) == list(range(7))
