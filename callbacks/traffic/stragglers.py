"""Detection of stragglers and their cause."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from trainwright.callbacks.step_clock import KINDS, StepClock
from trainwright.callbacks.steps import log_metrics
from trainwright.callbacks.windows import Clocked, Measured
from trainwright.checkpoint.exchange.distinct import all_gather_rows
from trainwright.core.config.options import number, require

# Stragglers named in a message.
_SHOWN = 8


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an optimizer step of one rank, averaged over a window.

    Args:
        compute: forward, backward and optimizer, without waits.
        data: until the next batch arrives.
        hooks: of callbacks and the module, between the others, without waits.
        waits: for other ranks, in any of these.
    """

    compute: float
    data: float
    hooks: float
    waits: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.data + self.hooks + self.waits


@dataclass(frozen=True)
class Straggler:
    """A rank that keeps others waiting.

    Args:
        rank: the global rank.
        place: its coordinates, such as ``"pipeline 1, shard 0"``; ``""`` if its number says it all.
        kind: where it is slower: ``"compute"``, ``"data"`` or ``"hooks"``.
        own: its seconds of that kind per step.
        others: the median of its peers.
        total: its seconds per step.
    """

    rank: int
    place: str
    kind: str
    own: float
    others: float
    total: float

    @property
    def share(self) -> float:
        """The fraction of the step by which it is behind its peers."""
        return (self.own - self.others) / self.total

    def __str__(self) -> str:
        who = f"rank {self.rank}" + (f" ({self.place})" if self.place else "")
        if self.kind == "compute":
            times = f"{self.own / self.others:.1f} x as long as" if self.others else "while nothing is to do for"
            what = f"computes {times} the median of its peers ({self.own * 1e3:.1f} ms, {self.others * 1e3:.1f} ms)"
        else:
            doing = "waits for data" if self.kind == "data" else "is in hooks of callbacks and the module for"
            percent, usual = 100 * self.own / self.total, 100 * self.others / self.total
            what = f"{doing} {percent:.0f} % of the time (the median of its peers: {usual:.0f} %)"
        return f"{who} {what}"


class Stragglers(Clocked[StepClock], Measured):
    """Report stragglers and their cause, every window and at the end.

    Each rank measures compute, data, hook and wait time of its steps. With synchronous training all ranks take equally
    long, and the straggler is the one that waits least. Per window ranks all-gather four numbers each; nothing else is
    communicated, and the device is not synchronized. Peers are the ranks of a pipeline stage, since stages differ in
    work; a rank alone in its stage is never reported.

    Logged are mean seconds per step over ranks, ``compute_seconds``, ``data_seconds``, ``hooks_seconds`` and
    ``waits_seconds``, and for the slowest straggler its rank as ``straggler`` and the fraction of a step by which it is
    behind as ``straggler_share``. A line of text reports each new straggler or cause.

    On CUDA all times are those of the compute stream.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (where 0 is off).
        threshold: fraction of a step by which a straggler is behind the median of its peers.

    Attributes:
        latest: times of every rank in the last window; empty before the first.
        stragglers: stragglers of the last window, slowest first.

    Raises:
        ValueError: if ``every_n_steps`` is less than 1, or ``threshold`` is not between 0 and 1.
    """

    _warm_up = 1

    needs_collective_steps = True
    """All ranks must be at the same optimizer step."""

    def __init__(self, every_n_steps: int | None = 100, threshold: float = 0.1) -> None:
        super().__init__(every_n_steps)
        require(self, float, number(0.1, above=0, below=1, unit="a fraction of a step"), threshold=threshold)
        self.threshold = threshold
        self.latest: list[StepTimes] = []
        self.stragglers: list[Straggler] = []
        self._reported: set[tuple[int, str]] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a ``ValueError`` for a Trainer or strategy of Lightning."""
        if stage == "fit" and not (hasattr(trainer, "phases") and hasattr(trainer.strategy, "measures")):
            raise ValueError(
                "Stragglers needs trainwright.Trainer with one of its strategies; this is "
                f"{type(trainer).__name__} with {type(trainer.strategy).__name__}."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring."""
        super().on_train_start(trainer, pl_module)
        if self._window:
            self._clock = StepClock(trainer)

    def _begin(self, trainer: Trainer, step: int) -> None:
        self._running_clock.take()

    def _report(self, trainer: Trainer, step: int) -> None:
        own = [seconds / self._done for seconds in self._running_clock.take()]
        mine = torch.tensor(own, dtype=torch.float32, device=trainer.strategy.root_device)
        self.latest = [StepTimes(*row) for row in all_gather_rows(mine).tolist()]
        layout = getattr(trainer.strategy, "layout", None)
        self.stragglers = find_stragglers(self.latest, layout, self.threshold)
        metrics = {
            f"{kind.name}_seconds": sum(getattr(each, kind.name) for each in self.latest) / len(self.latest)
            for kind in fields(StepTimes)
        }
        if self.stragglers:
            metrics |= {"straggler": self.stragglers[0].rank, "straggler_share": self.stragglers[0].share}
        log_metrics(trainer, metrics, step)
        self._warn(step)
        self._running_clock.refresh()

    def _warn(self, step: int) -> None:
        found = {(each.rank, each.kind) for each in self.stragglers}
        if found - self._reported:
            more = len(self.stragglers) - _SHOWN
            rest = f"; and {more} more" if more > 0 else ""
            rank_zero_warn(f"Step {step}: {'; '.join(map(str, self.stragglers[:_SHOWN]))}{rest}.")
        self._reported = found


def find_stragglers(times: Sequence[StepTimes], layout: Any, threshold: float) -> list[Straggler]:
    """Return the ranks that are slower than their peers, slowest first.

    Args:
        times: of every rank, in order.
        layout: of these ranks (:class:`~trainwright.core.layout.Layout`); ``None``: all are peers.
        threshold: fraction of a step.
    """
    size = len(times) if layout is None else layout.world_size // layout.pipeline
    if size == 1:
        return []
    medians = {
        (kind, first // size): _Medians([getattr(each, kind) for each in times[first : first + size]])
        for kind in KINDS
        for first in range(0, len(times), size)
    }
    found = []
    for rank, own in enumerate(times):
        if not own.total:
            continue
        others = {kind: medians[kind, rank // size].without(getattr(own, kind)) for kind in KINDS}
        kind = max(KINDS, key=lambda each: getattr(own, each) - others[each])
        taken, middle = getattr(own, kind), others[kind]
        if (taken - middle) / own.total >= threshold:
            place = "" if layout is None else _place(layout.coordinates(rank), layout)
            found.append(Straggler(rank, place, kind, taken, middle, own.total))
    return sorted(found, key=lambda each: each.share, reverse=True)


class _Medians:
    """Medians of all numbers but one; sorted once, since each of 100,000 ranks is compared with all others."""

    def __init__(self, values: Sequence[float]) -> None:
        self._sorted = sorted(values)

    def without(self, value: float) -> float:
        """Return the median without ``value``, which is one of the numbers."""
        left_out = bisect_left(self._sorted, value)
        half, is_odd = divmod(len(self._sorted) - 1, 2)
        places = (half,) if is_odd else (half - 1, half)
        return sum(self._sorted[place + (place >= left_out)] for place in places) / len(places)


def _place(coordinates: dict[str, int], layout: Any) -> str:
    """Return the coordinates along axes of size above 1, if there are several such axes."""
    axes = [axis for axis in coordinates if getattr(layout, axis) > 1]
    return ", ".join(f"{axis} {coordinates[axis]}" for axis in axes) if len(axes) > 1 else ""
