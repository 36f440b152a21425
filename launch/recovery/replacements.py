"""Single ranks that are restarted and rejoin while the others continue."""

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.core.failures.failure import RankError, failure_of
from trainwright.core.failures.records import read_steps
from trainwright.launch.ranks.supervisor import RankExit
from trainwright.launch.recovery.restarts import RestartLog, RestartPolicy, attempt_failure
from trainwright.strategies.parameter_server.options import INCARNATION


@dataclass(eq=False)
class Replacements:
    """Decisions about lost ranks, and the schedule of their replacements.

    Args:
        ranks: those that can be lost while the others train; empty = none.
        world_size: number of ranks.
        records: folder of the ranks' failure records.
        run_dir: of the run.
        policy: decides about every lost rank as about a restart.
        log: receives every loss and replacement.
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
        """Variables of a rank's first incarnation; empty where lost ranks are not replaced."""
        return {INCARNATION: "0"} if self.ranks else {}

    @property
    def pause(self) -> float | None:
        """Seconds until the next replacement is due; None = there is none."""
        return max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None

    def take(self, failed: Sequence[RankExit], start_step: int | None) -> bool:
        """Return whether the others continue without these ranks; if so, schedule their replacements.

        Args:
            failed: ranks that failed at about the same time.
            start_step: optimizer steps when training started; None = it has not: all ranks are still setting up, and
                none can be lost.

        Raises:
            RankError: if one may not be replaced any more.
        """
        if start_step is None or not {each.rank for each in failed} <= set(self.ranks):
            return False
        for each in failed:
            self._replace(each, start_step)
        return True

    def due(self) -> list[tuple[int, dict[str, str]]]:
        """Return the ranks to start now, with the variables of their incarnation."""
        now = time.monotonic()
        ranks = sorted(rank for rank, moment in self._due.items() if moment <= now)
        for rank in ranks:
            del self._due[rank]
            self._starts[rank] += 1
        return [(rank, {INCARNATION: str(self._starts[rank])}) for rank in ranks]

    def _replace(self, ended: RankExit, start_step: int) -> None:
        error = self._error(ended)
        setback = attempt_failure(error, read_steps(self.records).get(ended.rank), start_step)
        self.log.write(f"{error.summary} ({setback.when})", str(error))
        restart = self.policy.restart(error, setback, self.log)
        self.log.write(f"the others continue; rank {ended.rank} is restarted{restart.wait} and rejoins them")
        self._due[ended.rank] = time.monotonic() + restart.seconds

    def _error(self, ended: RankExit) -> RankError:
        error = failure_of(self.records, ended.rank, ended.exit_code, self.world_size, self.run_dir, ended.hang)
        # A later failure must not be attributed to this one.
        (self.records / f"{ended.rank}.json").unlink(missing_ok=True)
        return error
