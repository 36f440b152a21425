"""Ranks that a run can lose while the others go on: each is started anew for itself, and joins them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.core.failures.failure import RankError, failure_of
from trainwright.core.failures.records import read_steps
from trainwright.launch.ranks.supervisor import Ended
from trainwright.launch.recovery.restart_log import RestartLog
from trainwright.launch.recovery.restarts import RestartPolicy, setback_of
from trainwright.strategies.parameter_server.options import INCARNATION


@dataclass(eq=False)
class Replacements:
    """Decides about lost ranks, and knows when their replacements are due.

    Args:
        ranks: those that can be lost while the others train; empty = none.
        world_size: number of all ranks.
        records: where the ranks write down how they failed.
        run_dir: of the run.
        policy: asked about every lost rank, as about a restart.
        log: told of every one.
    """

    ranks: Collection[int]
    world_size: int
    records: Path
    run_dir: Path
    policy: RestartPolicy
    log: RestartLog

    def __post_init__(self) -> None:
        self._due: dict[int, float] = {}
        self._starts: Counter[int] = Counter()

    @property
    def environment(self) -> dict[str, str]:
        """What tells a rank that it is the first of its number, and that lost ones are started anew."""
        return {INCARNATION: "0"} if self.ranks else {}

    @property
    def pause(self) -> float | None:
        """Seconds until the next replacement is due; None: there is none."""
        return max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None

    def take(self, failed: Sequence[Ended], begun: int | None) -> bool:
        """Whether the others go on without these; then their replacements become due.

        Args:
            failed: ranks that ended badly, at about the same time.
            begun: optimizer steps that were done when training began; None: it has not, so that all still set up
                together, and none can be lost.

        Raises:
            RankError: if one may not be replaced any more.
        """
        if begun is None or not {each.rank for each in failed} <= set(self.ranks):
            return False
        for each in failed:
            self._replace(each, begun)
        return True

    def due(self) -> list[tuple[int, dict[str, str]]]:
        """Ranks to start now, and what tells each that it is not the first of its number."""
        now = time.monotonic()
        ranks = sorted(rank for rank, moment in self._due.items() if moment <= now)
        for rank in ranks:
            del self._due[rank]
            self._starts[rank] += 1
        return [(rank, {INCARNATION: str(self._starts[rank])}) for rank in ranks]

    def _replace(self, ended: Ended, begun: int) -> None:
        error = self._error(ended)
        setback = setback_of(error, read_steps(self.records).get(ended.rank), begun)
        self.log.tell(f"{error.summary} ({setback.when})", str(error))
        restart = self.policy.restart(error, setback, self.log)
        self.log.tell(f"the others go on; rank {ended.rank} is started anew{restart.wait} and joins them")
        self._due[ended.rank] = time.monotonic() + restart.seconds

    def _error(self, ended: Ended) -> RankError:
        error = failure_of(self.records, ended.rank, ended.exit_code, self.world_size, self.run_dir, ended.hang)
        # What a later failure is blamed on must not be this one.
        (self.records / f"{ended.rank}.json").unlink(missing_ok=True)
        return error
