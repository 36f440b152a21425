"""A run on the devices of one machine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.processes.scratch import scratch
from trainwright.core.run.interrupt import DeferredSignals
from trainwright.core.run.run_directory import write_config_file
from trainwright.launch.local.attempt import Attempt
from trainwright.launch.local.attempts import AttemptedRun
from trainwright.launch.members.replicas import ReplicaAttempt, keeps_replicas
from trainwright.launch.outcome.attempt import RankAttempt
from trainwright.launch.outcome.ending import notices
from trainwright.launch.ranks.forkserver import start_forkserver
from trainwright.launch.recovery.replacing import Replacements
from trainwright.launch.recovery.restart_log import RestartLog
from trainwright.launch.recovery.restarts import RestartPolicy
from trainwright.launch.recovery.shrinking import Shrinking
from trainwright.launch.watchdog.limits import HangLimits
from trainwright.launch.watchdog.monitor import HangMonitor
from trainwright.strategies.compose.world import options_of
from trainwright.strategies.contract.options import PlannedRun


def launch_local(cfg: DictConfig, verb: str, *, is_written: bool = True) -> dict[str, float]:
    """Start the ranks of a run on this machine and wait for their end; restart them where `launch` asks for it.

    Args:
        cfg: the resolved configuration; its run directory is there.
        verb: fit, validate, test or predict.
        is_written: whether it is what lies in the run directory; false: it goes on from there.

    Returns:
        The metrics that rank 0 ended with, by name.

    Raises:
        RankError: if a rank failed; all others have ended.
        Interrupted: if this process was told to end; all ranks have ended.
    """
    start_forkserver()
    with DeferredSignals(notices(cfg)):
        log = RestartLog(Path(cfg.run_dir))
        sizes = None if cfg.launch.min_devices is None else Shrinking(cfg, verb, log)
        return AttemptedRun(cfg, verb, LocalAttempts(verb, is_written, sizes), log, sizes).run()


class LocalAttempts:
    """Makes the attempts of a run on this machine.

    Args:
        verb: fit, validate, test or predict.
        is_written: whether the configuration of the first attempt is what lies in the run directory.
        sizes: who chooses the devices of each attempt; None = as many as the configuration says.
    """

    def __init__(self, verb: str, is_written: bool, sizes: Shrinking | None) -> None:
        self._verb = verb
        self._is_written = is_written
        self._sizes = sizes
        self._folder = Path(tempfile.mkdtemp(prefix="run-", dir=scratch()))

    def make(self, cfg: DictConfig, number: int, policy: RestartPolicy, log: RestartLog) -> RankAttempt:
        """An attempt that has not begun.

        Args:
            cfg: its resolved configuration.
            number: attempts before it.
            policy: asked by those that replace ranks while others go on.
            log: where they tell of it.
        """
        folder = Path(cfg.run_dir)
        records = self._folder / f"attempt_{number}"
        records.mkdir()
        if number > 0 or not self._is_written:
            # The run directory keeps the configuration that the user asked for.
            folder = records
            write_config_file(cfg, folder)
        environment = {} if self._sizes is None else self._sizes.environment()
        monitor = _monitor_of(cfg, records)
        if keeps_replicas(cfg, self._verb):
            return ReplicaAttempt(cfg, self._verb, records, monitor, environment, policy, log)
        options = options_of(cfg.strategy)
        ranks = () if options is None else PlannedRun(cfg, self._verb).replaceable_ranks(options)
        replacements = Replacements(ranks, cfg.devices, records, Path(cfg.run_dir), policy, log)
        return Attempt(cfg, self._verb, records, monitor, folder, number, environment, replacements)

    def close(self) -> None:
        """Remove what the attempts have left."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _monitor_of(cfg: DictConfig, records: Path) -> HangMonitor | None:
    """The monitor of an attempt; None where `launch.hang_timeout` is null.

    Args:
        cfg: the resolved configuration of the attempt.
        records: its folder for what the ranks write down.
    """
    launch = cfg.launch
    if launch.hang_timeout is None:
        return None
    folder = records / "watchdog"
    folder.mkdir()
    limits = HangLimits.of(
        launch.hang_timeout, launch.hang_safety_factor, launch.hang_floor_seconds, launch.hang_first_timeout
    )
    # While one process is being replaced, the one before may still live.
    return HangMonitor(2 * cfg.devices + launch.spares, folder, Path(cfg.run_dir), limits)
