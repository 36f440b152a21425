"""Time limits of phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from omegaconf import DictConfig

from trainwright.core.config.option_rules import is_positive
from trainwright.launch.watchdog.boxes import Progress


@dataclass(frozen=True)
class HangLimits:
    """Seconds without progress after which a rank counts as hanging.

    Each phase of a run (reading data, forward, backward, the optimizer, hooks, a validation batch, saving, ...) has its
    own limit: ``safety_factor`` times its longest duration on any rank of the machine so far, and at least
    ``floor_seconds``. Both are generous, because a false alarm costs a restart.

    Attributes:
        fixed: the same limit for every phase; ``None`` = learned.
        safety_factor: at least 1.
        floor_seconds: lower bound of the limit.
        first_timeout: limit of phases without history.
    """

    fixed: float | None = None
    safety_factor: float = 5.0
    floor_seconds: float = 30.0
    first_timeout: float = 1800.0

    @classmethod
    def of(
        cls, hang_timeout: str | float, safety_factor: float, floor_seconds: float, first_timeout: float
    ) -> HangLimits:
        """Return the limits for the user's options, where ``hang_timeout`` is ``"auto"`` or a number of seconds.

        Raises:
            ValueError: with what is out of range.
        """
        problems = list(limit_problems(hang_timeout, safety_factor, floor_seconds, first_timeout))
        if problems:
            raise ValueError("; ".join(problems))
        fixed = None if hang_timeout == "auto" else float(hang_timeout)
        return cls(fixed, safety_factor, floor_seconds, first_timeout)

    def limit(self, phase: str, ranks: Iterable[Progress]) -> float:
        """Return the current limit of ``phase`` in seconds.

        Args:
            phase: a name of :data:`~trainwright.launch.watchdog.boxes.PHASES`.
            ranks: progress of all ranks of this machine.
        """
        if self.fixed is not None:
            return self.fixed
        seen = [rank.longest[phase] for rank in ranks if phase in rank.longest]
        return max(self.floor_seconds, self.safety_factor * max(seen)) if seen else self.first_timeout

    def slow_limit(self) -> float:
        """Return the limit of work that is known to be slow, such as compilation."""
        return self.first_timeout if self.fixed is None else self.fixed

    def pause(self) -> float:
        """Return the seconds between questions to ranks that had a reason for being slow."""
        return min(self.floor_seconds, self.fixed or self.floor_seconds)


def limit_problems(timeout: object, safety_factor: float, floor_seconds: float, first_timeout: float) -> Iterator[str]:
    """Yield what is out of range, by the names of the Watchdog's arguments.

    Args:
        timeout: ``"auto"`` or a number of seconds.
        safety_factor: as in :class:`HangLimits`, like the rest.
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
    """Return the problems of the hang options of `launch`.

    Args:
        cfg: the resolved configuration.
    """
    launch = cfg.launch
    timeout = AUTO if launch.hang_timeout is None else launch.hang_timeout
    given = timeout, launch.hang_safety_factor, launch.hang_floor_seconds, launch.hang_first_timeout
    return [f"launch.hang_{problem.removeprefix('hang_')}" for problem in limit_problems(*given)]
