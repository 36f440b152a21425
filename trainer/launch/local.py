"""A run on the devices of one machine: its attempts, and what happens between them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from trainwright.trainer.check_recovery import replaceable_ranks
from trainwright.trainer.check_resume import going_on_in_place
from trainwright.trainer.launch.attempt import MARGIN_SECONDS, Attempt
from trainwright.trainer.launch.ending import notices
from trainwright.trainer.launch.failure import RankError
from trainwright.trainer.launch.forkserver import start_forkserver
from trainwright.trainer.launch.interrupt import raise_interrupted
from trainwright.trainer.launch.replacing import Replacements
from trainwright.trainer.launch.replicas import ReplicaAttempt, keeps_replicas
from trainwright.trainer.launch.restart_log import RestartLog
from trainwright.trainer.launch.restarts import RestartPolicy, Stop
from trainwright.trainer.launch.scratch import scratch
from trainwright.trainer.launch.shrinking import Shrinking
from trainwright.trainer.launch.sizes import resized
from trainwright.trainer.launch.watching import explained, monitor_of
from trainwright.trainer.run_directory import write_config_file
from trainwright.trainer.watchdog.monitor import HangMonitor

# Seconds that the other ranks have to end when a restart follows. Those that wait for the failed one in a collective of
# NCCL never notice; what they are saving is cleaned up by the next attempt.
_GRACE_BEFORE_RESTART = 1.0
# Seconds between two looks at whether the number of devices shall change.
_LOOK_SECONDS = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch_local(cfg: DictConfig, verb: str) -> dict[str, float]:
    """Start the ranks of a run on this machine and wait for their end; restart them where `launch` asks for it.

    Args:
        cfg: the resolved configuration, already written to its run directory.
        verb: fit, validate, test or predict.

    Returns:
        The metrics that rank 0 ended with, by name.

    Raises:
        RankError: if a rank failed; all others have ended.
        Interrupted: if this process was told to end; all ranks have ended.
    """
    start_forkserver()
    with _interrupted_by_signals(notices(cfg)):
        return LocalRun(cfg, verb).run()


class LocalRun:
    """The attempts of one run, one after the other.

    Args:
        cfg: the resolved configuration of the first attempt.
        verb: fit, validate, test or predict.
    """

    def __init__(self, cfg: DictConfig, verb: str) -> None:
        launch = cfg.launch
        self._first = cfg
        self._verb = verb
        self._folder = Path(tempfile.mkdtemp(prefix="run-", dir=scratch()))
        self._policy = RestartPolicy(launch.max_restarts, launch.same_failure_limit, launch.backoff_seconds)
        self._log = RestartLog(Path(cfg.run_dir))
        self._shrinking = None if launch.min_devices is None else Shrinking(cfg, verb, self._log)
        self._samples: int | None = None  # per optimizer step
        self._attempts = 0
        self._monitor: HangMonitor | None = None

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
                metrics = self._try(self._make(cfg))
                if metrics is not None:
                    return metrics
                cfg = self._next_config()
        finally:
            if self._shrinking is not None:
                self._shrinking.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _try(self, attempt: Attempt | ReplicaAttempt) -> dict[str, float] | None:
        """The metrics of the end; None: there is to be another attempt."""
        look_seconds = None if self._shrinking is None else _LOOK_SECONDS
        try:
            outcome = attempt.run(self._grace, look_seconds, lambda: self._resizes(attempt))
            if outcome.failure is not None:
                outcome = replace(outcome, failure=explained(outcome.failure, self._monitor))
        finally:
            if self._monitor is not None:
                self._monitor.close()
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

    def _make(self, cfg: DictConfig) -> Attempt | ReplicaAttempt:
        folder = Path(cfg.run_dir)
        records = self._folder / f"attempt_{self._attempts}"
        records.mkdir()
        if self._attempts > 0:
            # The run directory keeps the configuration that the user asked for.
            folder = records
            write_config_file(cfg, folder)
        environment = {} if self._shrinking is None else self._shrinking.environment()
        number, self._attempts = self._attempts, self._attempts + 1
        self._monitor = monitor = monitor_of(cfg, records)
        if keeps_replicas(cfg, self._verb):
            return ReplicaAttempt(
                cfg, self._verb, records, environment=environment, monitor=monitor, policy=self._policy, log=self._log
            )
        return Attempt(cfg, self._verb, folder, records, number, environment, monitor, self._replacements(cfg, records))

    def _replacements(self, cfg: DictConfig, records: Path) -> Replacements | None:
        """Who starts lost ranks anew while the others go on; None where all end with the first that is lost."""
        ranks = replaceable_ranks(cfg, self._verb)
        if not ranks:
            return None
        return Replacements(ranks, cfg.devices, records, Path(cfg.run_dir), self._policy, self._log)

    def _resizes(self, attempt: Attempt | ReplicaAttempt) -> bool:
        """Whether the attempt shall end because another number of devices is to be used."""
        beginning = attempt.beginning
        # One that does not train yet would lose its start, again and again.
        return (
            self._shrinking is not None and beginning is not None and self._shrinking.look(beginning.global_batch_size)
        )

    def _settle(self, attempt: Attempt | ReplicaAttempt, failure: RankError) -> None:
        """Decide about a failure, and wait where a restart has to.

        Raises:
            RankError: if there is no restart.
        """
        if self._policy.is_off:
            raise failure
        setback = attempt.setback(failure)
        self._log.tell(f"{failure.summary} ({setback.when})", str(failure))
        if self._shrinking is not None and self._shrinking.blame(setback, self._samples):
            self._policy.forgive()
        decision = self._policy.decide(setback)
        if isinstance(decision, Stop):
            self._log.tell(f"given up: {decision.reason}")
            raise failure.because(f"the run was given up: {decision.reason}")
        wait = f" in {decision.seconds:g} s" if decision.seconds else ""
        self._log.tell(f"restart {decision.number}{wait}; {self._log.path} says more")
        time.sleep(decision.seconds)

    def _next_config(self) -> DictConfig:
        devices = self._first.devices if self._shrinking is None else self._shrinking.size
        cfg = going_on_in_place(resized(self._first, devices, self._samples), self._verb)
        where = "from the start" if cfg.ckpt_path is None else f"from {cfg.ckpt_path}"
        self._log.tell(f"going on {where} with {devices} rank(s)")
        return cfg


@contextlib.contextmanager
def _interrupted_by_signals(more: Iterable[int]) -> Iterator[None]:
    """Raise `Interrupted` where this process is told to end, and put the handlers of the caller back after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, raise_interrupted) for number in {*_SIGNALS, *more}}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
