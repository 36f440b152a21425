"""A run on the devices of one machine."""

import shutil
import tempfile
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.processes.scratch import scratch
from trainwright.core.run.interrupt import DeferredSignals
from trainwright.core.run.run_directory import write_config_file
from trainwright.launch.local.attempt import Attempt
from trainwright.launch.local.attempts import AttemptedRun
from trainwright.launch.members.replicas import ReplicaAttempt, is_elastic_run
from trainwright.launch.outcome.attempt import RankAttempt
from trainwright.launch.outcome.interruption import handled_signals
from trainwright.launch.ranks.forkserver import start_forkserver
from trainwright.launch.recovery.replacements import Replacements
from trainwright.launch.recovery.restarts import RestartLog, RestartPolicy
from trainwright.launch.recovery.shrinking import Shrinking
from trainwright.launch.watchdog.limits import HangLimits
from trainwright.launch.watchdog.monitor import HangMonitor
from trainwright.strategies.compose.world import options_of
from trainwright.strategies.contract.options import PlannedRun


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
    with DeferredSignals(handled_signals(cfg)):
        log = RestartLog(Path(cfg.run_dir))
        sizes = None if cfg.launch.min_devices is None else Shrinking(cfg, verb, log)
        return AttemptedRun(cfg, verb, LocalAttempts(verb, is_written, sizes), log, sizes).run()


class LocalAttempts:
    """Factory of the attempts of a run on this machine.

    Args:
        verb: fit, validate, test or predict.
        is_written: whether the configuration of the first attempt is in the run directory.
        sizes: chooses the devices of each attempt; None = as many as the configuration says.
    """

    def __init__(self, verb: str, is_written: bool, sizes: Shrinking | None) -> None:
        self._verb = verb
        self._is_written = is_written
        self._sizes = sizes
        self._folder = Path(tempfile.mkdtemp(prefix="run-", dir=scratch()))

    def make(self, cfg: DictConfig, number: int, policy: RestartPolicy, log: RestartLog) -> RankAttempt:
        """Return an attempt that is not started.

        Args:
            cfg: its resolved configuration.
            number: earlier attempts.
            policy: decides about replacements of single ranks.
            log: receives them.
        """
        folder = Path(cfg.run_dir)
        records = self._folder / f"attempt_{number}"
        records.mkdir()
        if number > 0 or not self._is_written:
            # The run directory keeps the user's configuration.
            folder = records
            write_config_file(cfg, folder)
        environment = {} if self._sizes is None else self._sizes.environment()
        monitor = _monitor_of(cfg, records)
        if is_elastic_run(cfg, self._verb):
            return ReplicaAttempt(cfg, self._verb, records, monitor, environment, policy, log)
        options = options_of(cfg.strategy)
        ranks = () if options is None else PlannedRun(cfg, self._verb).replaceable_ranks(options)
        replacements = Replacements(ranks, cfg.devices, records, Path(cfg.run_dir), policy, log)
        return Attempt(cfg, self._verb, records, monitor, folder, number, environment, replacements)

    def close(self) -> None:
        """Remove the files of the attempts."""
        shutil.rmtree(self._folder, ignore_errors=True)


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
