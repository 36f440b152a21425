"""A soak test: a sequence of faults drawn from a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.inject.fault import FOLDER, Fault, Firings
from trainwright.callbacks.inject.network import Partition
from trainwright.callbacks.inject.process import Exit, Kill, Stop

# Faults overdue by more than this when training starts are skipped (seconds).
_LATE = 5.0


@dataclass(frozen=True)
class Planned:
    """One fault of a soak.

    Args:
        number: in order of time, from 0.
        after: seconds since the run first started.
        kind: of fault.
        rank: to strike.
    """

    number: int
    after: float
    kind: str
    rank: int


def plan(seed: int, every_seconds: tuple[float, float], kinds: Sequence[str], world_size: int) -> Iterator[Planned]:
    """Yield the faults of a soak without end; deterministic in the arguments."""
    draw, after, number = random.Random(seed), 0.0, 0  # noqa: S311 - not for secrets
    while True:
        after += draw.uniform(*every_seconds)
        yield Planned(number, after, draw.choice(list(kinds)), draw.randrange(world_size))
        number += 1


class Soak(Fault):
    """See :func:`trainwright.callbacks.inject.soak`."""

    def __init__(self, seed: int, every_seconds: float | Sequence[float], kinds: Sequence[str]) -> None:
        super().__init__(None, 0, None)
        self.seed = seed
        self.kinds = tuple(kinds)
        least, most = (every_seconds,) * 2 if isinstance(every_seconds, int | float) else every_seconds
        self.every_seconds = (float(least), float(most))
        self._began = 0.0
        self._from = 0.0  # seconds since the run first started; earlier faults are skipped
        self._next: Planned | None = None
        self._rest: Iterator[Planned] = iter(())
        self._parts: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agree on when the run first started. A collective."""
        super().on_train_start(trainer, pl_module)
        self._began = trainer.strategy.broadcast(self._first_beginning(trainer))
        self._skip_past()
        self._rest = plan(self.seed, self.every_seconds, self.kinds, trainer.world_size)
        self._next = next(self._rest)
        self._parts = {kind: _PARTS[kind]() for kind in self.kinds if kind != "partition"}
        if "partition" in self.kinds and trainer.world_size > 1:
            for rank in range(trainer.world_size):
                self._parts[f"partition {rank}"] = cut = Partition(rank, 0, None)
                cut.sentence = self.sentence
                cut.on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Strike if a fault is due."""
        self.reach(trainer)
        assert self._next is not None
        now = time.time() - self._began
        while now >= self._next.after:
            due, self._next = self._next, next(self._rest)
            if due.rank == trainer.global_rank and due.after >= self._from and not self._recorded(due):
                self._strike(due, trainer, pl_module)

    def _strike(self, due: Planned, trainer: Trainer, pl_module: LightningModule) -> None:
        self._key = self._key_of(due)
        self.fire(trainer)
        name = f"partition {due.rank}" if due.kind == "partition" else due.kind
        if name in self._parts:
            self._parts[name].strike(trainer, pl_module)
        self._skip_past()  # this process may have been stopped

    def _skip_past(self) -> None:
        self._from = time.time() - self._began - _LATE

    def _recorded(self, due: Planned) -> bool:
        assert self._firings is not None
        return bool(self._firings.of(self._key_of(due)))

    def _key_of(self, due: Planned) -> str:
        return f"{self.sentence} fault {due.number}: {due.kind}(rank={due.rank})"

    def _first_beginning(self, trainer: Trainer) -> float:
        if not trainer.is_global_zero:
            return 0.0
        kept = Firings(Path(trainer.default_root_dir) / FOLDER, 0)
        start = f"{self.sentence} began"
        if not kept.of(start):
            kept.add(start, trainer.global_step)
        return float(kept.of(start)[0]["time"])


_PARTS = {
    "kill": lambda: Kill(None, 0, None, signal=9),
    "stop": lambda: Stop(None, 0, None),
    "exit": lambda: Exit(None, 0, None, code=1),
}
