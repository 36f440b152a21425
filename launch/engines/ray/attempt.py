"""The attempts of a run on a cluster of Ray: its ranks from their start to the end of the last."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError, first_failure
from trainwright.core.run.interrupt import DeferredSignals, Interrupted
from trainwright.launch.engines.ray.actors import RankActors
from trainwright.launch.engines.ray.room import Room
from trainwright.launch.outcome.attempt import RankAttempt
from trainwright.launch.outcome.ending import patience, told_to_end
from trainwright.launch.outcome.outcome import LOOK_SECONDS, Outcome, metrics_after_signal, metrics_in
from trainwright.launch.ranks.follow import Follower
from trainwright.launch.recovery.restart_log import RestartLog
from trainwright.launch.recovery.restarts import RestartPolicy
from trainwright.launch.recovery.sizes import resized

# Seconds between two looks at the logs.
_LOOK_SECONDS = 1.0
# Ranks that fail together are noticed one after the other.
_TOGETHER_SECONDS = 0.5


class RayAttempts:
    """Makes the attempts of a run on a cluster.

    Args:
        verb: fit, validate, test or predict.
        room: where the ranks go.
        signals: held while Ray is asked.
    """

    def __init__(self, verb: str, room: Room, signals: DeferredSignals) -> None:
        self._verb = verb
        self._room = room
        self._signals = signals
        self._folder: Path | None = None

    def make(self, cfg: DictConfig, number: int, policy: RestartPolicy, log: RestartLog) -> RayAttempt:
        """An attempt that has not begun.

        Args:
            cfg: its resolved configuration.
            number: attempts before it.
            policy: not needed: all ranks start again together.
            log: not needed.
        """
        self._folder = Path(cfg.run_dir).absolute() / "logs" / "ray"
        records = self._folder / f"attempt_{number}"
        shutil.rmtree(records, ignore_errors=True)
        records.mkdir(parents=True)
        group, devices = self._room.place()
        if devices != cfg.devices:  # the first attempt of all, in a cluster without room for it
            cfg = resized(cfg, devices, None)
        return RayAttempt(cfg, self._verb, records, None, RankActors(cfg, number, group, self._signals))

    def close(self) -> None:
        """Remove the records."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._room.close()


@dataclass(eq=False)
class RayAttempt(RankAttempt):
    """The ranks of a run from their start to the end of the last, each held by an actor.

    Args:
        cfg: the resolved configuration of this attempt.
        verb: fit, validate, test or predict.
        records: an empty folder for what the ranks write down; all machines see it.
        actors: of the ranks, not yet started.
    """

    actors: RankActors

    def __post_init__(self) -> None:
        self._world_size = int(self.cfg.devices * self.cfg.nodes)
        self._run_dir = Path(self.cfg.run_dir).absolute()
        self._logs = Follower()

    def run(self, grace_after_failure: float, enough: Callable[[], bool] | None) -> Outcome:
        """See the base class."""
        self._logs.add_ranks(self._run_dir, range(self._world_size))
        try:
            failure = self.actors.start(self.verb, self.records)
            if failure is not None:
                return Outcome(failure)
            failed = self._wait(enough)
            if failed:
                self._end(signal.SIGTERM, grace_after_failure)
                return self._after_failure()
            if len(self.actors.codes) < self._world_size:
                self._end(signal.SIGTERM, patience(self.cfg, self.verb))
                return Outcome()
            return Outcome(metrics=metrics_in(self.records, self.cfg))
        except Interrupted as interrupted:
            return Outcome(metrics=self._after_signal(interrupted))
        finally:
            self.actors.kill()
            self._logs.finish()

    def _wait(self, enough: Callable[[], bool] | None) -> bool:
        """Wait for the end of all ranks, or for the first that fails and those that fail with it, or until it is
        enough; whether one has failed."""
        looked = time.monotonic()
        while self.actors.has_ranks:
            if self._hear(_LOOK_SECONDS):
                self._hear(_TOGETHER_SECONDS, of_all=True)
                return True
            if enough is not None and time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
                if enough():
                    return False
        return False

    def _hear(self, seconds: float, of_all: bool = False) -> bool:
        failed = self.actors.hear(seconds, of_all)
        self._logs.poll()
        return failed

    def _end(self, number: signal.Signals, grace: float) -> None:
        self.actors.end(number, grace, self._logs.poll)

    # ---- how it ended ------------------------------------------------------------------------------------------------

    def _after_failure(self) -> Outcome:
        failure = self._failure()
        told = told_to_end(self.cfg, self.actors.codes)
        if told is not None and not failure.is_cause and not self.actors.losses:
            raise told
        return Outcome(failure)

    def _failure(self) -> RankError:
        failure = first_failure(self.records, self.actors.codes, self._run_dir)
        if failure.is_cause or not self.actors.losses:
            return failure
        rank, reason = next(iter(self.actors.losses.items()))
        text = f"rank {rank} of {self._world_size} was lost with its actor; the others were ended\n\n{reason.strip()}"
        return RankError(text, rank, None)

    def _after_signal(self, interrupted: Interrupted) -> dict[str, float]:
        """Pass a signal on to the ranks; see :func:`~trainwright.launch.outcome.outcome.metrics_after_signal`."""
        try:
            self._end(interrupted.number, patience(self.cfg, self.verb, interrupted.number))
        except Interrupted:  # a second signal: at once
            raise interrupted from None
        return metrics_after_signal(self.records, self.cfg, self.actors.codes, interrupted, self._failure)
