"""Who watches the ranks that the launching process has started."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.failures.failure import RankError
from trainwright.launch.watchdog.limits import HangLimits
from trainwright.launch.watchdog.monitor import HangMonitor


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


def explained(failure: RankError, monitor: HangMonitor | None) -> RankError:
    """A failure, with what the ranks say of the calls in which the connections between them broke.

    Args:
        failure: what ended an attempt.
        monitor: of the attempt; None = nobody has watched.
    """
    if monitor is None or failure.hang is not None:
        return failure
    text = monitor.explain()
    return failure if text is None else failure.because(text)
