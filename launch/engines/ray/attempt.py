"""Attempts of a run on a Ray cluster."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError, first_failure
from trainwright.core.run.interrupt import DeferredSignals, Interrupted
from trainwright.launch.engines.ray.actors import RankActors
from trainwright.launch.engines.ray.placement import RankPlaces
from trainwright.launch.outcome.attempt import POLL_SECONDS, Outcome, RankAttempt, metrics_after_signal, metrics_in
from trainwright.launch.outcome.interruption import exit_timeout, interruption_in
from trainwright.launch.ranks.follow import Follower
from trainwright.launch.recovery.sizes import resized

# Seconds between two reads of the logs.
_POLL_SECONDS = 1.0
# Failures of several ranks arrive one after the other.
_TOGETHER_SECONDS = 0.5


def make_attempt(
    cfg: DictConfig, number: int, *_: Any, verb: str, folder: Path, room: RankPlaces, signals: DeferredSignals
) -> RayAttempt:
    """Return an attempt that is not started.

    Args:
        cfg: its resolved configuration.
        number: earlier attempts.
        verb: fit, validate, test or predict.
        folder: for the records of all attempts; visible to all machines.
        room: placement of the ranks.
        signals: held during calls of Ray.
    """
    records = folder / f"attempt_{number}"
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir(parents=True)
    group, devices = room.place()
    if devices != cfg.devices:  # the very first attempt, in a cluster without room for all
        cfg = resized(cfg, devices, None)
    return RayAttempt(cfg, verb, records, None, RankActors(cfg, number, group, signals))


@dataclass(eq=False)
class RayAttempt(RankAttempt):
    """The ranks of a run from their start to the exit of the last, each held by an actor.

    Args:
        cfg: the resolved configuration of this attempt.
        verb: fit, validate, test or predict.
        records: an empty folder for the ranks' records; visible to all machines.
        actors: of the ranks, not yet started.
    """

    actors: RankActors

    def __post_init__(self) -> None:
        self._world_size = int(self.cfg.devices * self.cfg.nodes)
        self._run_dir = Path(self.cfg.run_dir).absolute()
        self._logs = Follower()

    def run(self, grace_after_failure: float, should_stop: Callable[[], bool] | None) -> Outcome:
        """Run the attempt as in the base class."""
        self._logs.add_ranks(self._run_dir, range(self._world_size))
        try:
            failure = self.actors.start(self.verb, self.records)
            if failure is not None:
                return Outcome(failure)
            failed = self._wait(should_stop)
            if failed:
                self._end(signal.SIGTERM, grace_after_failure)
                return self._after_failure()
            if len(self.actors.codes) < self._world_size:
                self._end(signal.SIGTERM, exit_timeout(self.cfg, self.verb))
                return Outcome()
            return Outcome(metrics=metrics_in(self.records, self.cfg))
        except Interrupted as interrupted:
            return Outcome(metrics=self._after_signal(interrupted))
        finally:
            self.actors.kill()
            self._logs.finish()

    def _wait(self, should_stop: Callable[[], bool] | None) -> bool:
        """Wait until all ranks have exited, one has failed, or `should_stop()`; return whether one has failed."""
        looked = time.monotonic()
        while self.actors.has_ranks:
            if self._collect(_POLL_SECONDS):
                self._collect(_TOGETHER_SECONDS, of_all=True)
                return True
            if should_stop is not None and time.monotonic() - looked >= POLL_SECONDS:
                looked = time.monotonic()
                if should_stop():
                    return False
        return False

    def _collect(self, seconds: float, of_all: bool = False) -> bool:
        failed = self.actors.collect(seconds, of_all)
        self._logs.poll()
        return failed

    def _end(self, number: signal.Signals, grace: float) -> None:
        self.actors.end(number, grace, self._logs.poll)

    # ---- outcome -----------------------------------------------------------------------------------------------------

    def _after_failure(self) -> Outcome:
        failure = self._failure()
        interruption = interruption_in(self.cfg, self.actors.codes)
        if interruption is not None and not failure.is_cause and not self.actors.losses:
            raise interruption
        return Outcome(failure)

    def _failure(self) -> RankError:
        failure = first_failure(self.records, self.actors.codes, self._run_dir)
        if failure.is_cause or not self.actors.losses:
            return failure
        rank, reason = next(iter(self.actors.losses.items()))
        text = f"rank {rank} of {self._world_size} was lost with its actor; the others were ended\n\n{reason.strip()}"
        return RankError(text, rank, None)

    def _after_signal(self, interrupted: Interrupted) -> dict[str, float]:
        """Forward a signal to the ranks; see :func:`~trainwright.launch.outcome.attempt.metrics_after_signal`."""
        try:
            self._end(interrupted.number, exit_timeout(self.cfg, self.verb, interrupted.number))
        except Interrupted:  # a second signal ends them at once
            raise interrupted from None
        return metrics_after_signal(self.records, self.cfg, self.actors.codes, interrupted, self._failure)
