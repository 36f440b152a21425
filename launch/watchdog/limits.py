"""How long a phase may take before it counts as hanging."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from omegaconf import DictConfig

from trainwright.core.config.option_rules import is_positive
from trainwright.launch.watchdog.boxes import Progress


@dataclass(frozen=True)
class HangLimits:
    """Seconds without progress that are too many.

    Each phase of a run (reading data, forward, backward, the optimizer, hooks, a validation batch, saving, ...) has its
    own limit, ``safety_factor`` times the longest that any rank of the machine has taken for it so far, and at least
    ``floor_seconds``. The factor and the floor follow from what they protect: a false alarm costs a restart.

    Attributes:
        fixed: the same limit for every phase, learned or not; ``None`` = learned.
        safety_factor: how much longer than ever before a phase may take, 1 or more.
        floor_seconds: least limit.
        first_timeout: limit of a phase of which nothing is known yet.
    """

    fixed: float | None = None
    safety_factor: float = 5.0
    floor_seconds: float = 30.0
    first_timeout: float = 1800.0

    @classmethod
    def of(
        cls, hang_timeout: str | float, safety_factor: float, floor_seconds: float, first_timeout: float
    ) -> HangLimits:
        """From what a user gives, where ``hang_timeout`` is ``"auto"`` or a number of seconds.

        Raises:
            ValueError: with what is out of range.
        """
        problems = list(limit_problems(hang_timeout, safety_factor, floor_seconds, first_timeout))
        if problems:
            raise ValueError("; ".join(problems))
        fixed = None if hang_timeout == "auto" else float(hang_timeout)
        return cls(fixed, safety_factor, floor_seconds, first_timeout)

    def limit(self, phase: str, ranks: Iterable[Progress]) -> float:
        """Longest time in seconds that ``phase`` may take now.

        Args:
            phase: a name of :data:`~trainwright.launch.watchdog.boxes.PHASES`.
            ranks: what is known of all ranks of this machine.
        """
        if self.fixed is not None:
            return self.fixed
        seen = [rank.longest[phase] for rank in ranks if phase in rank.longest]
        return max(self.floor_seconds, self.safety_factor * max(seen)) if seen else self.first_timeout

    def slow_limit(self) -> float:
        """Limit of work that is seen to be slow for good reason, such as compilation."""
        return self.first_timeout if self.fixed is None else self.fixed

    def pause(self) -> float:
        """Seconds between two questions to ranks that were found to have a reason for standing still."""
        return min(self.floor_seconds, self.fixed or self.floor_seconds)


def limit_problems(timeout: object, safety_factor: float, floor_seconds: float, first_timeout: float) -> Iterator[str]:
    """Yield what is out of range, by the names of the Watchdog's arguments.

    Args:
        timeout: ``"auto"`` or a number of seconds.
        safety_factor: as of :class:`HangLimits`, like the rest.
    """
    if timeout != "auto" and not is_positive(timeout):
        yield f"hang_timeout={timeout}: must be auto (learned), a number of seconds above 0, or null (None) for off"
    if safety_factor < 1:
        yield (
            f"safety_factor={safety_factor:g}: must be at least 1, or what took long once would be a hang the next "
            "time; 5 is the default"
        )
    for name, seconds in (("floor_seconds", floor_seconds), ("first_timeout", first_timeout)):
        if seconds <= 0:
            yield f"{name}={seconds:g}: must be a number of seconds above 0"


AUTO = "auto"


def hang_problems(cfg: DictConfig) -> list[str]:
    """What speaks against what `launch` says of hangs.

    Args:
        cfg: the resolved configuration.
    """
    launch = cfg.launch
    timeout = AUTO if launch.hang_timeout is None else launch.hang_timeout
    given = timeout, launch.hang_safety_factor, launch.hang_floor_seconds, launch.hang_first_timeout
    return [f"launch.hang_{problem.removeprefix('hang_')}" for problem in limit_problems(*given)]
