"""Which rank keeps the others waiting, and what it does meanwhile."""

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
from trainwright.callbacks.windows import Measuring, Windowed
from trainwright.checkpoint.exchange.distinct import all_gather_rows

# Steps at the beginning that are left out: they compile, warm caches and make connections.
_WARM_UP = 1
# Slow ranks that a message names.
_SHOWN = 8


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an optimizer step of one rank, averaged over a window.

    Args:
        compute: forward, backward and optimizer, without waits.
        data: until the next batch is there.
        hooks: of callbacks and the module, between the others, without waits.
        waits: for other ranks, wherever.
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
        place: what tells it from its peers, such as ``"pipeline 1, shard 0"``; ``""``: nothing but its number.
        kind: what takes it longer: ``"compute"``, ``"data"`` or ``"hooks"``.
        own: seconds of a step that it takes for that.
        others: the median of its peers.
        total: seconds of its whole step.
    """

    rank: int
    place: str
    kind: str
    own: float
    others: float
    total: float

    @property
    def share(self) -> float:
        """The part of the step by which it is behind its peers."""
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


class Stragglers(Measuring, Windowed):
    """Tell, every few steps and at the end, which rank is slower than its peers and why.

    Each rank sums up for what it spends the time of its steps: computing, waiting for data, hooks of callbacks and the
    module, waiting for other ranks. In training that keeps in step all ranks take equally long, and the slow one is the
    one that waits least. At the end of a window all ranks exchange four numbers each, one all-gather; nothing else is
    communicated, and the device is never waited for. Ranks of one stage of a pipeline are compared with each other,
    since stages have different work; a rank that is alone in its stage has no peers and is never named.

    Logged are the means over the ranks in seconds of a step, ``compute_seconds``, ``data_seconds``, ``hooks_seconds``
    and ``waits_seconds``, and, while there is one, the number of the slowest rank as ``straggler`` and the part of a
    step by which it is behind as ``straggler_share``. One line of text appears when a rank is found slow that was not
    so in the window before, or for another reason.

    On CUDA all times are those of the stream that computes: for what it stands still while the host is late, and for
    how long it stands still for other ranks.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (there, 0 is off).
        threshold: part of a step by which a rank must be behind the median of its peers to be called slow.

    Raises:
        ValueError: if ``every_n_steps`` is less than 1, or ``threshold`` is not between 0 and 1.
    """

    # A strategy may have the weights of a step on their way while this one is called.
    looks_at_parameters = False

    needs_collective_steps = True
    """Whether it needs all ranks at the same optimizer step."""

    def __init__(self, every_n_steps: int | None = 100, threshold: float = 0.1) -> None:
        super().__init__(every_n_steps)
        if not 0 < threshold < 1:
            raise ValueError(f"Stragglers(threshold={threshold}) (allowed: a part of a step between 0 and 1, like 0.1)")
        self.threshold = threshold
        self.latest: list[StepTimes] = []
        """Of every rank, in the last window; empty before the first has ended."""
        self.stragglers: list[Straggler] = []
        """Ranks that were slow in the last window, the slowest first."""
        self._done = -_WARM_UP  # steps of this window
        self._clock: StepClock | None = None
        self._said: set[tuple[int, str]] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be measured.

        Raises:
            ValueError: if the Trainer or its strategy is not of this project.
        """
        if stage == "fit" and not (hasattr(trainer, "phases") and hasattr(trainer.strategy, "measures")):
            raise ValueError(
                f"Stragglers needs trainwright.Trainer and one of its strategies, which tell what they do; this is "
                f"{type(trainer).__name__} with {type(trainer.strategy).__name__}."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure."""
        super().on_train_start(trainer, pl_module)
        if not self._window:
            return
        self._done = -_WARM_UP
        self._clock = StepClock(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """At the end of a window, exchange and tell. A collective then."""
        if self._clock is None:
            return
        step = self._steps.ended(trainer)
        if step is None:
            return
        self._done += 1
        if self._done == 0:
            self._clock.take()
        elif self._done == self._window:
            self._tell(trainer, step)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a window anew, after a step that is left out."""
        super().on_gone_back(trainer, pl_module)
        self._done = -_WARM_UP

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell of what is left of a window. A collective, if there is something."""
        if self._clock is not None and self._done > 0:
            self._tell(trainer, self._steps.next_number(trainer) - 1)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.stop()
            self._clock = None

    def _tell(self, trainer: Trainer, step: int) -> None:
        assert self._clock is not None
        own = [seconds / self._done for seconds in self._clock.take()]
        self.latest = _of_all_ranks(own, trainer)
        layout = getattr(trainer.strategy, "layout", None)
        self.stragglers = find_stragglers(self.latest, layout, self.threshold)
        metrics = {
            f"{kind.name}_seconds": sum(getattr(each, kind.name) for each in self.latest) / len(self.latest)
            for kind in fields(StepTimes)
        }
        if self.stragglers:
            metrics |= {"straggler": self.stragglers[0].rank, "straggler_share": self.stragglers[0].share}
        log_metrics(trainer, metrics, step)
        self._say(step)
        self._done = 0
        self._clock.refresh()

    def _say(self, step: int) -> None:
        found = {(each.rank, each.kind) for each in self.stragglers}
        if found - self._said:
            more = len(self.stragglers) - _SHOWN
            rest = f"; and {more} more" if more > 0 else ""
            rank_zero_warn(f"Step {step}: {'; '.join(map(str, self.stragglers[:_SHOWN]))}{rest}.")
        self._said = found


def find_stragglers(times: Sequence[StepTimes], layout: Any, threshold: float) -> list[Straggler]:
    """Ranks that are slower than their peers, the slowest first.

    Args:
        times: of every rank, in order.
        layout: of these ranks (:class:`~trainwright.core.layout.Layout`); ``None``: all are peers.
        threshold: part of a step.
    """
    of_a_stage = len(times) if layout is None else layout.world_size // layout.pipeline
    stages = [rank // of_a_stage for rank in range(len(times))]
    usual = {
        kind: {
            stage: _Medians(values) for stage, values in _by_stage([getattr(e, kind) for e in times], stages).items()
        }
        for kind in KINDS
    }
    found = []
    for rank, own in enumerate(times):
        if not own.total or not usual[KINDS[0]][stages[rank]].has_others:
            continue
        others = {kind: usual[kind][stages[rank]].without(getattr(own, kind)) for kind in KINDS}
        kind = max(KINDS, key=lambda each: getattr(own, each) - others[each])
        taken, middle = getattr(own, kind), others[kind]
        if (taken - middle) / own.total >= threshold:
            place = "" if layout is None else _place(layout.coordinates(rank), layout)
            found.append(Straggler(rank, place, kind, taken, middle, own.total))
    return sorted(found, key=lambda each: each.share, reverse=True)


def _by_stage(values: Sequence[float], stages: Sequence[int]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for value, stage in zip(values, stages, strict=True):
        found.setdefault(stage, []).append(value)
    return found


class _Medians:
    """Medians of all numbers but one: sorted once, since each of 100,000 ranks is held against all others."""

    def __init__(self, values: Sequence[float]) -> None:
        self._sorted = sorted(values)

    @property
    def has_others(self) -> bool:
        """Whether there is more than one number."""
        return len(self._sorted) > 1

    def without(self, value: float) -> float:
        """The median of the others than ``value``, which is one of the numbers."""
        left_out = bisect_left(self._sorted, value)
        half, is_odd = divmod(len(self._sorted) - 1, 2)
        places = (half,) if is_odd else (half - 1, half)
        return sum(self._sorted[place + (place >= left_out)] for place in places) / len(places)


def _place(coordinates: dict[str, int], layout: Any) -> str:
    """Coordinates along the axes that there are, if more than one tells ranks apart."""
    axes = [axis for axis in coordinates if getattr(layout, axis) > 1]
    return ", ".join(f"{axis} {coordinates[axis]}" for axis in axes) if len(axes) > 1 else ""


def _of_all_ranks(own: Sequence[float], trainer: Trainer) -> list[StepTimes]:
    """What every rank has measured, by rank. A collective."""
    mine = torch.tensor(own, dtype=torch.float32, device=trainer.strategy.root_device)
    return [StepTimes(*row) for row in all_gather_rows(mine).tolist()]
