"""What is impossible about the search for hangs, as far as it can be told before a process starts."""

from __future__ import annotations

from omegaconf import DictConfig

from trainwright.launch.watchdog.limits import limit_problems

AUTO = "auto"


def hang_problems(cfg: DictConfig) -> list[str]:
    """What speaks against what `launch` says of hangs.

    Args:
        cfg: the resolved configuration.
    """
    launch = cfg.launch
    timeout = AUTO if launch.hang_timeout is None else launch.hang_timeout
    given = timeout, launch.hang_safety_factor, launch.hang_floor_seconds, launch.hang_first_timeout
    return [f"launch.hang_{problem.removeprefix('hang_')}" for problem in limit_problems(*given)]
