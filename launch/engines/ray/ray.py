"""`launch=ray`: a placement group of Ray, with an actor for each rank.

This command is Ray's driver: it decides about failures as with `launch=local` (`trainwright.launch.local.attempts`),
while Ray decides where ranks are. Ray starts no actor again by itself: one rank alone could not go on.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.processes.held_signals import HeldSignals
from trainwright.launch.engines.ray.attempt import RayAttempts
from trainwright.launch.engines.ray.cluster import cluster
from trainwright.launch.engines.ray.problems import problems
from trainwright.launch.engines.ray.room import Room
from trainwright.launch.local.attempts import AttemptedRun
from trainwright.launch.outcome.ending import notices
from trainwright.launch.recovery.restart_log import RestartLog

__all__ = ["launch", "problems"]


def launch(cfg: DictConfig, verb: str) -> dict[str, float]:
    """Run the ranks as actors, and start them again where `launch` asks for it.

    Args:
        cfg: the resolved configuration, already written to its run directory.
        verb: fit, validate, test or predict.

    Returns:
        The metrics that rank 0 ended with, by name.

    Raises:
        RankError: if a rank failed; all others have ended.
        Interrupted: if this process was told to end; all ranks have ended.
        ConfigError: if the cluster cannot be reached, or has no room.
    """
    with HeldSignals(notices(cfg)) as signals, cluster(cfg, signals):
        log = RestartLog(Path(cfg.run_dir))
        room = Room(cfg, verb, log, signals)
        sizes = None if cfg.launch.min_devices is None else room
        return AttemptedRun(cfg, verb, RayAttempts(verb, room, signals), log, sizes).run()
