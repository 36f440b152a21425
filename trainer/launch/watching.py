"""Who watches the ranks that the launching process has started."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from trainwright.trainer.watchdog.limits import HangLimits
from trainwright.trainer.watchdog.monitor import HangMonitor


def monitor_of(cfg: DictConfig, records: Path) -> HangMonitor | None:
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
