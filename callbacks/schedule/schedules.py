"""Learning rates as functions of the number of optimizer steps.

:class:`RunSchedule` is what ``schedule=`` sets. Each other one is what DeepSpeed's scheduler of that name sets
(deepspeed.readthedocs.io, "Learning Rate Schedulers"), step by step: it sets a rate once before training and then after
each optimizer step, so the second step still has the first rate of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from omegaconf import DictConfig

from trainwright.core.config.options import number, refuse, value_problems, word

Rate = float | list[float]
Shape = Literal["log", "linear"]
_CHECKED = ("warmup_steps", "shape", "up_steps", "down_steps")


class Schedule:
    """Base of all schedules: dataclasses whose fields say what they allow."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if name in _CHECKED}
        refuse(value_problems(type(self), given), type(self).__name__)

    def rate(self, steps: int, base: float, group: int) -> float:
        """Return the learning rate of the next optimizer step.

        Args:
            steps: optimizer steps done.
            base: the optimizer's own rate.
            group: index of the parameter group.
        """
        raise NotImplementedError

    def of_run(self, steps: float) -> Schedule:
        """Return the schedule of a run of so many optimizer steps; ``math.inf`` or negative: its length is unknown."""
        return self

    def betas(self, steps: int, group: int) -> tuple[float, float] | None:
        """Return the betas of the next optimizer step; `None`: unchanged."""
        return None

    def lengths(self) -> list[int]:
        """Return the lengths of lists of rates, one rate per parameter group."""
        return [len(value) for value in vars(self).values() if isinstance(value, list)]


@dataclass
class RunSchedule(Schedule):
    """Linear warm-up, the optimizer's own rate, and a decay to a fraction of it that ends with the run.

    Lengths are optimizer steps, or below 1 fractions of the run. The first step already has `1 / (warmup + 1)` of the
    rate, since a step at rate 0 would be wasted. A run of unknown length has no decay.

    Raises:
        ValueError: for a value that its field does not allow, or a fraction of a run of unknown length.
    """

    # Form of the decay: linear, cosine, constant (no decay), none (the module's own schedule); set by the group.
    shape: str = word("none", "none", "constant", "linear", "cosine")
    # Length of the warm-up, in optimizer steps, or below 1 as a fraction of the run; 0 = off.
    warmup: float = number(0.0)
    # Length of the decay, in optimizer steps, or below 1 as a fraction of the run; null = all after the warm-up.
    decay: float | None = number(None, above=0)
    # Learning rate at the end, as a fraction of the optimizer's; 1 = no decay.
    final_factor: float = number(0.1, most=1)
    # Optimizer steps of the whole schedule; null = the length of the run.
    total_steps: int | None = number(None, least=1)

    def __post_init__(self) -> None:
        refuse(value_problems(type(self), vars(self)), type(self).__name__)

    def of_run(self, steps: float) -> RunSchedule:
        """See :class:`Schedule`."""
        if self.total_steps is not None:
            return self
        is_known = 0 < steps < math.inf
        refuse([] if is_known else self.fractions())
        return replace(self, total_steps=int(steps)) if is_known else self

    def fractions(self) -> Iterator[str]:
        """Yield why each length that is a fraction needs the length of the run."""
        for name in ("warmup", "decay"):
            if 0 < (value := getattr(self, name) or 0) < 1:
                yield (
                    f"schedule.{name}={value:g} is a fraction of a run whose length is unknown. Type "
                    f"schedule.total_steps=1000 (or max_steps=1000), or give schedule.{name} in optimizer steps"
                )

    def factor(self, steps: int) -> float:
        """Return the factor, 0 to 1, on the optimizer's rate after `steps` optimizer steps."""
        warmup = self._steps(self.warmup)
        if steps < warmup:
            return (steps + 1) / (warmup + 1)
        if self.shape == "constant" or self.total_steps is None:
            return 1.0
        if steps >= self.total_steps:
            return self.final_factor
        start = warmup if self.decay is None else max(warmup, self.total_steps - self._steps(self.decay))
        way = max(0.0, steps - start) / max(1.0, self.total_steps - start)
        left = 1 - way if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * way))
        return self.final_factor + (1 - self.final_factor) * left

    def rate(self, steps: int, base: float, group: int) -> float:
        """See :class:`Schedule`."""
        return base * self.factor(steps)

    def _steps(self, length: float) -> float:
        return round(length * (self.total_steps or 0)) if length < 1 else length


def schedule_problems(cfg: DictConfig) -> Iterator[str]:
    """Yield what is wrong with ``schedule`` in a resolved configuration, besides the values of its keys."""
    schedule = RunSchedule(**cfg.schedule)
    if schedule.total_steps is None and cfg.max_steps is None and cfg.max_epochs is None:
        yield from schedule.fractions()


@dataclass(frozen=True)
class Warmup(Schedule):
    """From `lowest` to `highest` in `warmup_steps` steps, then constant.

    Args:
        warmup_steps: optimizer steps; at least 2 are taken.
        lowest: rate of the first step; a list has one for each parameter group.
        highest: rate after the warm-up; `None`: the optimizer's own.
        shape: `log` (steep first) or `linear`.

    Raises:
        ValueError: for another `shape`, or negative `warmup_steps`.
    """

    warmup_steps: float = 1000
    lowest: Rate = 0.0
    highest: Rate | None = None
    shape: Shape = "log"

    def rate(self, steps: int, base: float, group: int) -> float:
        """See :class:`Schedule`."""
        low = _of(self.lowest, group)
        high = base if self.highest is None else _of(self.highest, group)
        return low + (high - low) * self._part(steps)

    def _part(self, steps: int) -> float:
        """Return the fraction of the way from lowest to highest."""
        return _warm(steps, self.warmup_steps, self.shape)


@dataclass(frozen=True)
class WarmupDecay(Warmup):
    """As :class:`Warmup`, then down to `lowest` in a straight line, reached after `total_steps` steps.

    Args:
        total_steps: optimizer steps in total.
    """

    total_steps: int = 10000

    def _part(self, steps: int) -> float:
        warmup, index = max(2, self.warmup_steps), steps - 1
        if index < warmup:
            return _warm(steps, self.warmup_steps, self.shape)
        return max(0.0, (self.total_steps - index) / max(1.0, self.total_steps - warmup))


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """From a fraction of the optimizer's own rate to all of it, then down along a cosine.

    Args:
        warmup_steps: optimizer steps; at least 2 are taken.
        total_steps: optimizer steps in total.
        first_part: fraction of the rate at the start of the warm-up; the first step has rate 0.
        last_part: fraction of the rate at the end.
        shape: of the warm-up, `log` or `linear`.

    Raises:
        ValueError: for another `shape`, or negative `warmup_steps`.
    """

    warmup_steps: float = 1000
    total_steps: int = 10000
    first_part: float = 0.0
    last_part: float = 0.0001
    shape: Shape = "log"

    def rate(self, steps: int, base: float, group: int) -> float:
        """See :class:`Schedule`."""
        if steps == 0:
            return 0.0
        warmup, index = max(2, self.warmup_steps), steps - 1
        if index < warmup:
            return base * (self.first_part + (1 - self.first_part) * _warm(steps, self.warmup_steps, self.shape))
        way = min(1.0, (index - warmup + 1) / max(1, self.total_steps - warmup))
        height = (1 + math.cos(math.pi * way)) / 2
        return base * max(0.0, self.last_part + (1 - self.last_part) * height)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Up from `lowest` to `highest` and down again, while momentum does the opposite; then decay (arXiv:1803.09820).

    Args:
        lowest: rate at both ends of the cycle; a list has one for each parameter group.
        highest: rate in the middle.
        up_steps: optimizer steps of the first half.
        down_steps: of the second half; `None`: as many.
        up_stairs: constant pieces of the first half; 0: a straight line.
        down_stairs: of the second half; `None`: as many.
        decay_every: optimizer steps between decays after the cycle; 0: none.
        decay: added to the divisor of the rate per decay.
        lowest_momentum: beta 1 where the rate is highest.
        highest_momentum: beta 1 where it is lowest; beta 2 is 0.99 throughout.
        momentum_decay: added to the factor of momentum per decay.
        cycle_momentum: `False` leaves the betas of the optimizer alone.

    Raises:
        ValueError: if the cycle has no length.
    """

    lowest: Rate
    highest: Rate
    up_steps: float = number(2000, above=0)
    down_steps: float | None = None
    up_stairs: int = 0
    down_stairs: int | None = None
    decay_every: float = 0
    decay: float = 0.0
    lowest_momentum: Rate = 0.8
    highest_momentum: Rate = 0.9
    momentum_decay: float = 0.0
    cycle_momentum: bool = True

    def rate(self, steps: int, base: float, group: int) -> float:
        """See :class:`Schedule`."""
        low, high = _of(self.lowest, group), _of(self.highest, group)
        if steps == 0:
            return low
        if steps - 1 < self._length:
            return low + (high - low) * self._height(steps)
        return low / (1 + self.decay * self._decays(steps)) if self._decays(steps) else low

    def betas(self, steps: int, group: int) -> tuple[float, float] | None:
        """See :class:`Schedule`."""
        if not self.cycle_momentum:
            return None
        low, high = _of(self.lowest_momentum, group), _of(self.highest_momentum, group)
        if steps == 0:
            return low, 0.99
        if steps - 1 < self._length:
            return high - (high - low) * self._height(steps), 0.99
        return high * (1 + self.momentum_decay * self._decays(steps)), 0.99

    @property
    def _down(self) -> float:
        return self.up_steps if self.down_steps is None else self.down_steps

    @property
    def _length(self) -> float:
        return self.up_steps + self._down

    def _decays(self, steps: int) -> float:
        return (steps - self._length) / self.decay_every if self.decay_every else 0.0

    def _height(self, steps: int) -> float:
        """Return the height within the cycle: 0 at both ends, 1 in the middle."""
        place = steps % self._length
        rising = place <= self.up_steps
        height = place / self.up_steps if rising else (self._length - place) / self._down
        stairs = self.up_stairs if rising or self.down_stairs is None else self.down_stairs
        return math.floor(height * stairs + 1e-9) / stairs if stairs else height


@dataclass(frozen=True)
class RangeTest(Schedule):
    """From `lowest` up without end, to find the rate at which training diverges (arXiv:1506.01186, section 3.3).

    Args:
        lowest: rate of the first step; a list has one for each parameter group.
        every: optimizer steps in which the rate grows by `growth` times `lowest`.
        growth: see `every`.
        staircase: grow once every `every` steps; `False`: at each step.
    """

    lowest: Rate = 1e-3
    every: int = 2000
    growth: float = 1.0
    staircase: bool = False

    def rate(self, steps: int, base: float, group: int) -> float:
        """See :class:`Schedule`."""
        intervals = steps / self.every
        return _of(self.lowest, group) * (1 + self.growth * (math.floor(intervals) if self.staircase else intervals))


def _warm(steps: int, warmup_steps: float, shape: Shape) -> float:
    """Return the fraction of the warm-up done after `steps` optimizer steps."""
    warmup, index = max(2, warmup_steps), steps - 1
    if index >= warmup:
        return 1.0
    if index < 0:
        return 0.0
    return math.log(steps) / math.log(warmup) if shape == "log" else index / warmup


def _of(rate: Rate, group: int) -> float:
    return float(rate[group]) if isinstance(rate, list) else float(rate)
