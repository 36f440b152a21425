"""A run on the devices of one machine, whose lost ranks are replaced where possible."""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError, failure_of, first_failure
from trainwright.core.failures.records import read_steps
from trainwright.core.processes.scratch import scratch
from trainwright.core.run.interrupt import DeferredSignals, Interrupted
from trainwright.core.run.run_directory import write_config_file
from trainwright.launch.local.attempts import AttemptedRun
from trainwright.launch.members.replicas import ReplicaAttempt, is_elastic_run
from trainwright.launch.outcome.attempt import (
    POLL_SECONDS,
    Outcome,
    RankAttempt,
    forward_signal,
    metrics_after_signal,
    metrics_in,
)
from trainwright.launch.outcome.interruption import exit_timeout, handled_signals, interruption_in
from trainwright.launch.rank import rank_main
from trainwright.launch.ranks.forkserver import start_forkserver
from trainwright.launch.ranks.rendezvous import LocalStore, rank_environment
from trainwright.launch.ranks.supervisor import RankExit, Supervisor
from trainwright.launch.recovery.restarts import RestartLog, RestartPolicy, attempt_failure
from trainwright.launch.recovery.sizes import Shrinking
from trainwright.launch.watchdog.boxes import HangLimits
from trainwright.launch.watchdog.monitor import HangMonitor
from trainwright.strategies.compose.world import options_of
from trainwright.strategies.contract.options import PlannedRun
from trainwright.strategies.parameter_server.options import INCARNATION


def launch_local(cfg: DictConfig, verb: str, *, is_written: bool = True) -> dict[str, float]:
    """Start the ranks of a run on this machine and wait for their exit; restart them as `launch` says.

    Args:
        cfg: the resolved configuration; its run directory exists.
        verb: fit, validate, test or predict.
        is_written: whether `cfg` is the configuration in the run directory; false = a later attempt of that run.

    Returns:
        The final metrics of rank 0 by name.

    Raises:
        RankError: if a rank failed; all others have exited.
        Interrupted: if this process was interrupted; all ranks have exited.
    """
    start_forkserver()
    with DeferredSignals(handled_signals(cfg)), ExitStack() as stack:
        log = RestartLog(Path(cfg.run_dir))
        scratch_folder = Path(tempfile.mkdtemp(prefix="run-", dir=scratch()))
        stack.callback(shutil.rmtree, scratch_folder, ignore_errors=True)
        sizes = None if cfg.launch.min_devices is None else stack.enter_context(closing(Shrinking(cfg, verb, log)))

        def make(cfg: DictConfig, number: int, policy: RestartPolicy, log: RestartLog) -> RankAttempt:
            folder = Path(cfg.run_dir)
            records = scratch_folder / f"attempt_{number}"
            records.mkdir()
            if number > 0 or not is_written:
                # The run directory keeps the user's configuration.
                folder = records
                write_config_file(cfg, folder)
            environment = {} if sizes is None else sizes.environment()
            monitor = _monitor_of(cfg, records)
            if is_elastic_run(cfg, verb):
                return ReplicaAttempt(cfg, verb, records, monitor, environment, policy, log)
            options = options_of(cfg.strategy)
            ranks = () if options is None else PlannedRun(cfg, verb).replaceable_ranks(options)
            replacements = Replacements(ranks, cfg.devices, records, Path(cfg.run_dir), policy, log)
            return Attempt(cfg, verb, records, monitor, folder, number, environment, replacements)

        return AttemptedRun(cfg, verb, make, log, sizes).run()


def _monitor_of(cfg: DictConfig, records: Path) -> HangMonitor | None:
    """Return the hang monitor of an attempt; None if `launch.hang_timeout` is null."""
    launch = cfg.launch
    if launch.hang_timeout is None:
        return None
    folder = records / "watchdog"
    folder.mkdir()
    limits = HangLimits.of(
        launch.hang_timeout, launch.hang_safety_factor, launch.hang_floor_seconds, launch.hang_first_timeout
    )
    # A process may overlap with its replacement.
    return HangMonitor(2 * cfg.devices + launch.spares, folder, Path(cfg.run_dir), limits)


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


# Failures of several ranks arrive one after the other; the second may be the cause.
_TOGETHER_SECONDS = 0.1


@dataclass(eq=False)
class Attempt(RankAttempt):
    """Local ranks of a run, which all end when one fails that cannot be replaced.

    Attributes:
        folder: with the `config.yaml` that the ranks read.
        number: earlier attempts.
        environment: variables of the ranks besides those of the rendezvous.
        replacements: restarts single ranks while the others continue.
    """

    folder: Path
    number: int
    environment: Mapping[str, str]
    replacements: Replacements

    def run(self, grace_after_failure: float, should_stop: Callable[[], bool] | None) -> Outcome:
        """Run the attempt as in the base class, replacing lost ranks where possible."""
        with (
            LocalStore(self.cfg.launch.port) as store,
            Supervisor(rank_main, (self.verb, self.folder, self.records), self.monitor) as ranks,
        ):
            try:
                for rank in range(self.cfg.devices):
                    self._start(ranks, rank, store.port, self.replacements.environment)
                ended = self._wait(ranks, store.port, should_stop)
            except Interrupted as interrupted:
                ended = forward_signal(ranks, self.cfg, self.verb, interrupted)
                codes = {each.rank: each.exit_code for each in ended}
                failure = partial(first_failure, self.records, codes, Path(self.cfg.run_dir))
                return Outcome(metrics=metrics_after_signal(self.records, self.cfg, codes, interrupted, failure))
            if not any(each.failed for each in ended):
                if not ranks.living:
                    return Outcome(metrics=metrics_in(self.records, self.cfg))
                ranks.end(ranks.living, exit_timeout(self.cfg, self.verb))
                return Outcome()
            ended += ranks.end(ranks.living, grace_after_failure)
        return Outcome(self._failure(ended))

    def _start(self, ranks: Supervisor, rank: int, port: int, more: Mapping[str, str]) -> None:
        environment = rank_environment(self.cfg, rank, port, self.number)
        ranks.start_rank(rank, {**environment, **self.environment, **more})

    def _wait(self, ranks: Supervisor, port: int, should_stop: Callable[[], bool] | None) -> list[RankExit]:
        """Wait until all ranks have exited, one has failed that cannot be replaced, or `should_stop` returns True."""
        ended: list[RankExit] = []
        look = None if should_stop is None else POLL_SECONDS
        while ranks.living or self.replacements.pause is not None:
            pauses = [pause for pause in (look, self.replacements.pause) if pause is not None]
            some = _next_ends(ranks, min(pauses, default=None))
            failed = [each for each in some if each.failed]
            beginning = self.beginning if failed else None
            if failed and not self.replacements.take(failed, None if beginning is None else beginning.step):
                return ended + some
            ended += [each for each in some if not each.failed]
            for rank, more in self.replacements.due():
                self._start(ranks, rank, port, more)
            if should_stop is not None and ranks.living and should_stop():
                return ended
        return ended

    def _failure(self, ended: list[RankExit]) -> RankError:
        codes = {each.rank: None if each.asked else each.exit_code for each in ended}
        hangs = {each.rank: each.hang for each in ended if each.hang is not None}
        failure = first_failure(self.records, codes, Path(self.cfg.run_dir), hangs)
        interruption = interruption_in(self.cfg, codes)
        # A rank that did not save in time was killed, and the others lost their connections to it.
        if interruption is not None and not failure.is_cause:
            raise interruption
        return failure


def _next_ends(ranks: Supervisor, seconds: float | None) -> list[RankExit]:
    """Wait at most `seconds` for ranks to exit; after a failure, also for those that fail with it."""
    if not ranks.living:
        time.sleep(seconds or 0.0)  # all are lost, and replacements are due later
    ended = ranks.wait(seconds)
    return ended + ranks.wait(_TOGETHER_SECONDS) if any(each.failed for each in ended) else ended
