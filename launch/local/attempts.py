"""Attempts of a run, and what happens between them."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.problems import ConfigError
from trainwright.launch.outcome.attempt import RankAttempt
from trainwright.launch.outcome.interruption import MARGIN_SECONDS
from trainwright.launch.recovery.check_resume import resume_in_place
from trainwright.launch.recovery.restarts import AttemptFailure, RestartLog, RestartPolicy
from trainwright.launch.recovery.sizes import resized

# Seconds that the other ranks have to exit before a restart. Ranks waiting in an NCCL collective never notice a
# failure; the next attempt cleans up their unfinished checkpoints.
_GRACE_BEFORE_RESTART = 1.0


MakeAttempt = Callable[[DictConfig, int, RestartPolicy, RestartLog], RankAttempt]
"""Returns an attempt that is not started, given its configuration, how many came before, and what decides about losses
of single ranks and logs them.
"""


class Sizes(Protocol):
    """Choice of the devices of each attempt."""

    @property
    def size(self) -> int:
        """Devices of the next attempt."""

    def look(self, samples: int | None) -> bool:
        """Return whether the number of devices changes now; `samples` per optimizer step, as reported by the ranks."""

    def blame(self, setback: AttemptFailure, samples: int | None) -> bool:
        """Account for a failure; return whether the next attempt omits its cause."""


class AttemptedRun:
    """The attempts of one run, one after the other.

    Args:
        cfg: the resolved configuration of the first attempt.
        verb: fit, validate, test or predict.
        make: creates the attempts.
        log: receives failures and restarts.
        sizes: chooses the devices of each attempt; None = as many as the configuration says.
    """

    def __init__(
        self, cfg: DictConfig, verb: str, make: MakeAttempt, log: RestartLog, sizes: Sizes | None = None
    ) -> None:
        launch = cfg.launch
        self._first = cfg
        self._verb = verb
        self._make = make
        self._policy = RestartPolicy(launch.max_restarts, launch.same_failure_limit, launch.backoff_seconds)
        self._log = log
        self._sizes = sizes
        self._samples: int | None = None  # per optimizer step
        self._attempts = 0

    def run(self) -> dict[str, float]:
        """Run attempts until one completes the run.

        Returns:
            The final metrics of rank 0 by name.

        Raises:
            RankError: if an attempt failed and no other follows.
            Interrupted: if this process was interrupted.
        """
        cfg = self._first
        while True:
            attempt = self._make(cfg, self._attempts, self._policy, self._log)
            self._attempts += 1
            try:
                metrics = self._run_attempt(attempt)
            except RankError as failure:
                failure.is_refused = self._is_refused(attempt, failure)
                raise
            if metrics is not None:
                return metrics
            cfg = self._next_config()

    def _run_attempt(self, attempt: RankAttempt) -> dict[str, float] | None:
        """Return the final metrics; None = another attempt follows."""
        should_stop = None if self._sizes is None else lambda: self._resizes(attempt)
        try:
            outcome = attempt.run(self._grace, should_stop)
            if outcome.failure is not None:
                outcome = replace(outcome, failure=attempt.explain(outcome.failure))
        finally:
            attempt.close()
        if self._samples is None and attempt.beginning is not None:
            self._samples = attempt.beginning.global_batch_size
        if outcome.failure is not None:
            self._handle_failure(attempt, outcome.failure)
        return outcome.metrics

    @property
    def _grace(self) -> float:
        if self._policy.is_off:
            return float(self._first.launch.grace_seconds) + MARGIN_SECONDS
        return _GRACE_BEFORE_RESTART

    def _resizes(self, attempt: RankAttempt) -> bool:
        """Return whether the attempt must end because another number of devices is to be used."""
        beginning = attempt.beginning
        # An attempt that has not reached training would lose its start repeatedly.
        return self._sizes is not None and beginning is not None and self._sizes.look(beginning.global_batch_size)

    def _handle_failure(self, attempt: RankAttempt, failure: RankError) -> None:
        """Decide about a failure, and wait before a restart.

        Raises:
            RankError: if there is no restart.
        """
        if self._policy.is_off or self._is_refused(attempt, failure):
            raise failure
        setback = attempt.setback(failure)
        self._log.write(f"{failure.summary} ({setback.when})", str(failure))
        if self._sizes is not None and self._sizes.blame(setback, self._samples):
            self._policy.forgive()
        restart = self._policy.restart(failure, setback, self._log)
        self._log.write(f"restart {restart.number}{restart.wait}; {self._log.path} has details")
        time.sleep(restart.seconds)

    def _is_refused(self, attempt: RankAttempt, failure: RankError) -> bool:
        """Return whether a rank refused the configuration before any training."""
        return self._attempts == 1 and attempt.beginning is None and failure.kind == ConfigError.__name__

    def _next_config(self) -> DictConfig:
        devices = self._first.devices if self._sizes is None else self._sizes.size
        cfg = resume_in_place(resized(self._first, devices, self._samples, self._first.nodes), self._verb)
        where = "from the start" if cfg.ckpt_path is None else f"from {cfg.ckpt_path}"
        self._log.write(f"resuming {where} with {devices * cfg.nodes} rank(s)")
        return cfg
