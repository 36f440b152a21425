"""Data of other shapes: streams, lists, texts of several lengths, batches that are no tensors alone."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.zoo.base import CLASSES, DIM, SAMPLES, Classifier, LanguageModel, _labels, _random, tokens, vectors
from tests.zoo.cells import Row


class Stream(IterableDataset[Any]):
    """Yields all samples on every rank; variants override ``part``, the first sample and the distance of the next."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(SAMPLES, DIM, generator=_random()), _labels(SAMPLES)

    def part(self) -> tuple[int, int]:
        return 0, 1

    def __iter__(self) -> Iterator[Any]:
        first, every = self.part()
        return iter(list(zip(self.x, self.y, strict=True))[first::every])


class SizedStream(Stream):
    """Tells how many samples there are."""

    def __len__(self) -> int:
        return SAMPLES


class SplitByRank(Stream):
    """Splits itself by torch's rank, as WebDataset's split_by_node does."""

    def part(self) -> tuple[int, int]:
        ready = torch.distributed.is_initialized()
        return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if ready else (0, 1)


class SplitByEnvironment(Stream):
    """Splits itself by the environment of its process."""

    def part(self) -> tuple[int, int]:
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class SplitByWorker(Stream):
    """Splits itself by worker process, of which there is none here."""

    def part(self) -> tuple[int, int]:
        worker = get_worker_info()
        return (worker.id, worker.num_workers) if worker else (0, 1)


class Batches(Stream):
    """Yields whole batches."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, SAMPLES, self.batch):
            yield self.x[start : start + self.batch], self.y[start : start + self.batch]


def stream(kind: type[Stream]) -> Any:
    """A loader of this stream."""
    return lambda batch: DataLoader(kind(), batch_size=batch)


def batches(batch: int) -> DataLoader[Any]:
    """A stream of batches."""
    return DataLoader(Batches(batch), batch_size=None)


def collated(collate: Any) -> Any:
    """``vectors``, with what a batch is made by ``collate(x, y)``."""

    def make(batch: int) -> DataLoader[Any]:
        data: Any = vectors(batch).dataset

        def together(rows: Any) -> Any:
            x, y = zip(*rows, strict=True)
            return collate(torch.stack(x), torch.stack(y))

        return DataLoader(data, batch_size=batch, collate_fn=together)

    return make


Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    """A batch as a data class."""

    x: Tensor
    y: Tensor


class OfDictionary(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch["inputs"]["x"], batch["y"]))


class OfAttributes(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch.x, batch.y))


class Weighted(Classifier):
    """Class weights come with the batch."""

    def loss(self, batch: Any) -> Tensor:
        x, y, weights = batch
        return (F.cross_entropy(self(x), y, reduction="none") * weights[y]).mean()


class WithWords(Classifier):
    """A list of strings beside the tensors."""

    def loss(self, batch: Any) -> Tensor:
        x, y, words = batch
        scale = torch.tensor([1.0 + len(word) / 10 for word in words], device=x.device)
        return (F.cross_entropy(self(x), y, reduction="none") * scale).mean()


class WithNumber(Classifier):
    """A Python number for the whole batch."""

    def loss(self, batch: Any) -> Tensor:
        x, y, number = batch
        return super().loss((x, y)) * number


class WithNothing(Classifier):
    """``None`` where a mask may stand."""

    def loss(self, batch: Any) -> Tensor:
        x, y, mask = batch
        assert mask is None
        return super().loss((x, y))


class OfLists(Classifier):
    """A list of samples instead of a tensor."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((torch.stack(x), torch.tensor(y, device=x[0].device)))


class OfRagged(Classifier):
    """All points of all samples in one tensor, with the sample of each."""

    def loss(self, batch: Any) -> Tensor:
        points, sample, y = batch
        pooled = torch.zeros(len(y), DIM, device=y.device).index_add(0, sample, self.net.run(self.net.stem(points)))
        return F.cross_entropy(self.net.head(pooled), y)


def ragged(batch: int) -> DataLoader[Any]:
    """``(points: (sum of sizes, 16), sample: (sum of sizes,), y: (B,))``."""
    data: Any = vectors(batch).dataset

    def together(rows: Any) -> Any:
        sizes = [1 + int(y) for _, y in rows]
        points = torch.cat([x.expand(size, -1) for (x, _), size in zip(rows, sizes, strict=True)])
        sample = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(sizes))
        return points, sample, torch.stack([y for _, y in rows])

    return DataLoader(data, batch_size=batch, collate_fn=together)


class Padded(LanguageModel):
    """Texts of several lengths; padding is no target, each text counts the same."""

    def loss(self, batch: Tensor) -> Tensor:
        inputs, targets = batch[:, :-1].clamp_min(0), batch[:, 1:]
        losses = F.cross_entropy(self(inputs).mT, targets, ignore_index=-100, reduction="none")
        return (losses.sum(1) / (targets >= 0).sum(1)).mean()


class PaddedByTokens(LanguageModel):
    """The same as a mean over all tokens of the batch, as transformers computes it."""

    def loss(self, batch: Tensor) -> Tensor:
        inputs, targets = batch[:, :-1].clamp_min(0), batch[:, 1:]
        return F.cross_entropy(self(inputs).mT, targets, ignore_index=-100)


def padded(batch: int) -> DataLoader[Any]:
    """Texts of 5 to 9 tokens, padded to the longest of all by -100."""
    data: Any = tokens(batch).dataset

    def together(rows: Any) -> Tensor:
        cut = [row[: 5 + int(row[0]) % 5] for row in rows] + [torch.zeros(9, dtype=torch.long)]
        return pad_sequence(cut, batch_first=True, padding_value=-100)[:-1]

    return DataLoader(data, batch_size=batch, collate_fn=together)


class TwoLoaders(Classifier):
    """Labelled and unlabelled data side by side."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch["labelled"]
        return super().loss((x, y)) + 0.1 * self(batch["unlabelled"][0]).square().mean()


def two_loaders(batch: int) -> Any:
    """A dictionary of loaders."""
    return {"labelled": vectors(batch), "unlabelled": vectors(batch)}


class Augments(Classifier):
    """Changes batches in ``on_after_batch_transfer``."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x + 0.1 * x.roll(1, -1), y


class AugmentsInPlace(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(2)


class AlphaMix(Classifier):
    """Mixes each sample with the next one of the batch (mixup with a fixed weight)."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self(0.7 * x + 0.3 * x.flip(0))
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y.flip(0))


WEIGHTS = torch.linspace(0.5, 2.0, CLASSES)
ROWS = [
    Row(
        "a stream",
        Classifier,
        stream(Stream),
        equal="tensor, pipeline",
        either="ddp, zero1, zero2, zero3, tensor x shard",
    ),
    Row("a sized stream", Classifier, stream(SizedStream), equal="tensor", either="ddp"),
    Row("a stream split by rank", Classifier, stream(SplitByRank), either="ddp, pipeline"),
    Row("a stream split by environment", Classifier, stream(SplitByEnvironment), either="ddp, pipeline"),
    Row("a stream split by worker", Classifier, stream(SplitByWorker), equal="pipeline", either="ddp"),
    Row("a stream of batches", Classifier, batches, equal="pipeline", either="ddp"),
    Row(
        "nested dictionaries", OfDictionary, collated(lambda x, y: {"inputs": {"x": x}, "y": y}), equal="ddp, pipeline"
    ),
    Row("named tuples", OfAttributes, collated(Pair), equal="ddp, pipeline"),
    Row("data classes", OfAttributes, collated(Record), equal="ddp", either="pipeline"),
    Row("class weights", Weighted, collated(lambda x, y: (x, y, WEIGHTS)), equal="ddp", either="pipeline"),
    Row("words", WithWords, collated(lambda x, y: (x, y, ["ab" * int(c) for c in y])), equal="ddp", either="pipeline"),
    Row("a number", WithNumber, collated(lambda x, y: (x, y, 0.5)), equal="ddp, pipeline"),
    Row("None", WithNothing, collated(lambda x, y: (x, y, None)), equal="ddp, pipeline"),
    Row("lists of tensors", OfLists, collated(lambda x, y: (list(x), y.tolist())), equal="ddp", either="pipeline"),
    Row("points of samples", OfRagged, ragged, equal="ddp", either="pipeline"),
    Row("padded texts", Padded, padded, equal="ddp, pipeline"),
    Row("padded texts by tokens", PaddedByTokens, padded, equal="tensor", either="pipeline"),
    Row("two loaders", TwoLoaders, two_loaders, equal="ddp, pipeline"),
    Row("on_after_batch_transfer", Augments, vectors, equal="ddp, pipeline"),
    Row("changes batches in place", AugmentsInPlace, vectors, equal="ddp, pipeline"),
    Row("mixes samples of a batch", AlphaMix, vectors, equal="tensor", either="pipeline"),
]
