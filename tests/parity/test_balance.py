"""Unequal shares of the global batch compute what equal shares compute, also while shares change."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from tests.parity.harness import Record, differences, make_trainer
from tests.parity.layout_modules import make_module
from tests.parity.layouts import LayoutCase as Case
from tests.parity.layouts import Texts, WholeRecorder

TOLERANCE = 1e-6
AUTO = {"every_steps": 1, "smoothing": 0.0}
SLOW_FIRST, SLOW_LAST = [4.0, 1.0], [1.0, 4.0]  # seconds per sample of the data ranks
TOKENS = {"loss_weighting": "tokens"}


class Paced(Callback):
    """In place of the clock: a data rank takes so many seconds for each sample that it is given.

    Also keeps the sizes of its batches, and what was logged.
    """

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds
        self.sizes: list[int] = []
        self.logged: list[float] = []
        self._told = 0
        self._mine = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._mine = self.seconds[trainer.strategy.data_rank]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch["tokens"]))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.logged += [float(value) for name, value in trainer.callback_metrics.items() if name == "mean_step"]

    def begin(self, phase: str) -> None:
        """A phase begins."""

    def take(self, wait_for_device: bool = False) -> list[float]:
        """Seconds of compute, data, hooks and waits since the last call."""
        new, self._told = sum(self.sizes[self._told :]), len(self.sizes)
        return [new * self._mine, 0.0, 0.0, 0.0]


def run(case: Case, balance: Any, seconds: list[float], micro: int, workers: int = 0) -> tuple[Record, Paced, Any]:
    recorder, paced = WholeRecorder(), Paced(seconds)
    trainer = make_trainer(
        case.strategy,
        dict(case.options),
        global_batch_size=case.global_batch_size,
        max_steps=case.steps,
        max_epochs=-1,
        callbacks=[recorder, paced],
        balance=balance,
        **case.trainer,
    )
    if trainer.balance is not None:
        trainer.balance.make_clock = lambda waits: paced
    loader = DataLoader(Texts(case.samples), batch_size=micro, num_workers=workers, shuffle=True)
    trainer.fit(make_module(case.network), loader)
    return recorder.record, paced, trainer


def held_against_equal(case: Case, balance: Any, seconds: list[float], micro: int, workers: int = 0) -> Any:
    """What differs from equal shares, and the sizes of this rank's batches."""
    equal, _, _ = run(case, "none", seconds, micro)
    record, paced, _ = run(case, balance, seconds, micro, workers)
    return differences(record, equal, TOLERANCE), paced.sizes


# An epoch is 16, 16 and 12 samples.
COMMON: dict[str, Any] = {"global_batch_size": 16, "steps": 5, "samples": 44}
TWO: dict[str, tuple[Any, ...]] = {
    "ddp": (Case("gpt", {}, "ddp", **COMMON), AUTO, SLOW_LAST, 8),
    "ddp, loader workers": (Case("gpt", {}, "ddp", **COMMON), AUTO, SLOW_FIRST, 8, 1),
    "zero1, accumulated": (Case("gpt", {}, "zero1", **COMMON), [3, 1], SLOW_LAST, 4),
    "zero3": (Case("gpt", {}, "zero3", **COMMON), AUTO, SLOW_LAST, 8),
    "zero2, by tokens": (Case("masked", {}, "zero2", trainer=TOKENS, **COMMON), AUTO, SLOW_FIRST, 4),
    "ddp, uneven steps": (Case("gpt", {}, "ddp", trainer={"uneven_steps": True}, **COMMON), AUTO, SLOW_LAST, 6),
}
FOUR: dict[str, tuple[Any, ...]] = {
    "pipeline x replicate": (
        Case("gpt2", {"pipeline": 2, "replicate": 2, "shard": 1, "stage": 1}, **COMMON), AUTO, SLOW_LAST, 4,
    ),
    "pipeline x shard": (Case("gpt2", {"pipeline": 2, "shard": 2}, **COMMON), AUTO, SLOW_FIRST, 8),
    "tensor x replicate": (
        Case("gpt-untied", {"tensor": 2, "replicate": 2, "shard": 1}, **COMMON), [1, 3], SLOW_FIRST, 8,
    ),
}  # fmt: skip


def all_held(cases: list[tuple[Any, ...]]) -> list[Any]:
    return [held_against_equal(*each) for each in cases]


def assert_equal(ranks: Any, world_size: int, cases: dict[str, tuple[Any, ...]]) -> dict[str, list[list[int]]]:
    """No rank differs; returns the sizes of batches by case and rank."""
    results = ranks(all_held, world_size, list(cases.values()), timeout=120)
    found = [
        f"rank {rank}, {name}: {difference}"
        for rank, result in enumerate(results)
        for name, (different, _) in zip(cases, result, strict=True)
        for difference in different
    ]
    assert not found, "\n".join(found[:40])
    return {name: [result[index][1] for result in results] for index, name in enumerate(cases)}


def test_two_ranks(ranks: Any) -> None:
    sizes = assert_equal(ranks, 2, TWO)
    print(sizes)


def test_four_ranks(ranks: Any) -> None:
    sizes = assert_equal(ranks, 4, FOUR)
    print(sizes)
