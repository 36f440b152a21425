"""Who may go on: the rules of consistency, the clocks of workers and the bound between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Consistency = Literal["sync", "ssp", "async"]


@dataclass(frozen=True)
class Rules:
    """How servers treat what workers push.

    Args:
        consistency: ``"sync"``, ``"ssp"`` or ``"async"``.
        staleness: steps that a worker may be ahead of the slowest, with ``"ssp"``.
        delay_compensation: lambda of DC-ASGD (arXiv:1609.08326, section 3, with constant lambda): a gradient g that was
            computed at parameters v becomes ``g + lambda * g * g * (w - v)`` where they are w by now; 0: off.
        scale_by_staleness: divide learning rates by the steps that others made since the worker pulled
            (arXiv:1511.05950, section 3).
    """

    consistency: Consistency
    staleness: int | None = None
    delay_compensation: float = 0.0
    scale_by_staleness: bool = False

    @property
    def bound(self) -> int | None:
        """The bound of :class:`Clocks` that they stand for."""
        return {"sync": 0, "ssp": self.staleness, "async": None}[self.consistency]


class Clocks:
    """Counts the steps of each worker and says who may begin the next one.

    A worker at clock ``c`` has made ``c`` steps. It may go on if the slowest worker has made ``c - bound`` at least:
    bound 0 is bulk synchronous, ``s`` is stale synchronous parallel (Ho et al., "More effective distributed ML via a
    stale synchronous parallel parameter server", NIPS 2013, section 2), ``None`` is asynchronous. Workers that wait for
    all others (at a meeting) and those that are gone hold up nobody. Not safe between threads.

    Args:
        bound: steps that a worker may be ahead of the slowest; ``None``: any number.

    Raises:
        ValueError: if ``bound`` is negative.
    """

    def __init__(self, bound: int | None) -> None:
        if bound is not None and bound < 0:
            raise ValueError(f"bound={bound} (allowed: a whole number of steps from 0, or None for no bound)")
        self.bound = bound
        self._clocks: dict[int, int] = {}
        self._waiting: set[int] = set()

    @property
    def workers(self) -> tuple[int, ...]:
        """Those that live, in order."""
        return tuple(sorted(self._clocks))

    @property
    def training(self) -> tuple[int, ...]:
        """Those that live and are not waiting for all others, in order."""
        return tuple(worker for worker in self.workers if worker not in self._waiting)

    @property
    def slowest(self) -> int:
        """The least clock of those that are training; of all that live if none is; 0 if none lives."""
        return min((self._clocks[worker] for worker in self.training or self.workers), default=0)

    def clock(self, worker: int) -> int:
        """Steps that a living worker has made."""
        return self._clocks[worker]

    def join(self, worker: int) -> int:
        """A worker comes, or comes again, and starts where the slowest is; returns its clock."""
        self.leave(worker)
        self._clocks[worker] = self.slowest
        return self._clocks[worker]

    def leave(self, worker: int) -> None:
        """A worker is gone: no one waits for it any more."""
        self._clocks.pop(worker, None)
        self._waiting.discard(worker)

    def tick(self, worker: int) -> None:
        """A worker has made a step."""
        self._clocks[worker] += 1

    def may_go(self, worker: int) -> bool:
        """Whether a worker may begin its next step."""
        return self.bound is None or self._clocks[worker] - self.slowest <= self.bound

    def wait(self, worker: int) -> None:
        """A worker waits for all others."""
        self._waiting.add(worker)

    @property
    def have_met(self) -> bool:
        """Whether all that live wait for each other."""
        return bool(self._clocks) and not self.training

    def go_on(self) -> None:
        """After a meeting: all are at the same clock, that of the fastest."""
        latest = max(self._clocks.values(), default=0)
        self._clocks = dict.fromkeys(self._clocks, latest)
        self._waiting.clear()
