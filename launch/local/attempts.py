"""A run whose ranks are started, and started again: its attempts, and what happens between them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.core.problems import ConfigError
from trainwright.launch.outcome.attempt import RankAttempt
from trainwright.launch.outcome.ending import MARGIN_SECONDS
from trainwright.launch.recovery.check_resume import going_on_in_place
from trainwright.launch.recovery.restart_log import RestartLog
from trainwright.launch.recovery.restarts import RestartPolicy, Setback
from trainwright.launch.recovery.sizes import resized

# Seconds that the other ranks have to end when a restart follows. Those that wait for the failed one in a collective of
# NCCL never notice; what they are saving is cleaned up by the next attempt.
_GRACE_BEFORE_RESTART = 1.0


class AttemptMaker(Protocol):
    """Who makes the attempts, and knows where their ranks are."""

    def make(self, cfg: DictConfig, number: int, policy: RestartPolicy, log: RestartLog) -> RankAttempt:
        """An attempt that has not begun; `number` came before it."""

    def close(self) -> None:
        """Remove what the attempts have left."""


class Sizes(Protocol):
    """Who chooses the devices of each attempt."""

    @property
    def size(self) -> int:
        """Devices of the next attempt."""

    def look(self, samples: int | None) -> bool:
        """Whether the number of devices changes now; `samples` of an optimizer step are as the ranks have told."""

    def blame(self, setback: Setback, samples: int | None) -> bool:
        """Hear of a failure; True if the next attempt does without what has caused it."""

    def close(self) -> None:
        """End what it has begun."""


class AttemptedRun:
    """The attempts of one run, one after the other.

    Args:
        cfg: the resolved configuration of the first attempt.
        verb: fit, validate, test or predict.
        maker: makes the attempts.
        log: where failures and restarts are told.
        sizes: who chooses the devices of each attempt; None = as many as the configuration says.
    """

    def __init__(
        self, cfg: DictConfig, verb: str, maker: AttemptMaker, log: RestartLog, sizes: Sizes | None = None
    ) -> None:
        launch = cfg.launch
        self._first = cfg
        self._verb = verb
        self._maker = maker
        self._policy = RestartPolicy(launch.max_restarts, launch.same_failure_limit, launch.backoff_seconds)
        self._log = log
        self._sizes = sizes
        self._samples: int | None = None  # per optimizer step
        self._attempts = 0

    def run(self) -> dict[str, float]:
        """Go from attempt to attempt until one comes to the end of the run.

        Returns:
            The metrics that rank 0 ended with, by name.

        Raises:
            RankError: if an attempt failed and there is no other.
            Interrupted: if this process was told to end.
        """
        cfg = self._first
        try:
            while True:
                attempt = self._maker.make(cfg, self._attempts, self._policy, self._log)
                self._attempts += 1
                try:
                    metrics = self._try(attempt)
                except RankError as failure:
                    failure.is_refused = self._is_refused(attempt, failure)
                    raise
                if metrics is not None:
                    return metrics
                cfg = self._next_config()
        finally:
            if self._sizes is not None:
                self._sizes.close()
            self._maker.close()

    def _try(self, attempt: RankAttempt) -> dict[str, float] | None:
        """The metrics of the end; None: there is to be another attempt."""
        enough = None if self._sizes is None else lambda: self._resizes(attempt)
        try:
            outcome = attempt.run(self._grace, enough)
            if outcome.failure is not None:
                outcome = replace(outcome, failure=attempt.explain(outcome.failure))
        finally:
            attempt.close()
        if self._samples is None and attempt.beginning is not None:
            self._samples = attempt.beginning.global_batch_size
        if outcome.failure is not None:
            self._settle(attempt, outcome.failure)
        return outcome.metrics

    @property
    def _grace(self) -> float:
        if self._policy.is_off:
            return float(self._first.launch.grace_seconds) + MARGIN_SECONDS
        return _GRACE_BEFORE_RESTART

    def _resizes(self, attempt: RankAttempt) -> bool:
        """Whether the attempt shall end because another number of devices is to be used."""
        beginning = attempt.beginning
        # One that does not train yet would lose its start, again and again.
        return self._sizes is not None and beginning is not None and self._sizes.look(beginning.global_batch_size)

    def _settle(self, attempt: RankAttempt, failure: RankError) -> None:
        """Decide about a failure, and wait where a restart has to.

        Raises:
            RankError: if there is no restart.
        """
        if self._policy.is_off or self._is_refused(attempt, failure):
            raise failure
        setback = attempt.setback(failure)
        self._log.tell(f"{failure.summary} ({setback.when})", str(failure))
        if self._sizes is not None and self._sizes.blame(setback, self._samples):
            self._policy.forgive()
        restart = self._policy.restart(failure, setback, self._log)
        self._log.tell(f"restart {restart.number}{restart.wait}; {self._log.path} says more")
        time.sleep(restart.seconds)

    def _is_refused(self, attempt: RankAttempt, failure: RankError) -> bool:
        """Whether a rank has refused the configuration before the run trained anything."""
        return self._attempts == 1 and attempt.beginning is None and failure.kind == ConfigError.__name__

    def _next_config(self) -> DictConfig:
        devices = self._first.devices if self._sizes is None else self._sizes.size
        cfg = going_on_in_place(resized(self._first, devices, self._samples, self._first.nodes), self._verb)
        where = "from the start" if cfg.ckpt_path is None else f"from {cfg.ckpt_path}"
        self._log.tell(f"going on {where} with {devices * cfg.nodes} rank(s)")
        return cfg
