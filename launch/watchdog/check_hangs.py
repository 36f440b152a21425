"""What is impossible about the search for hangs, as far as it can be told before a process starts."""

from __future__ import annotations

from omegaconf import DictConfig

AUTO = "auto"


def hang_problems(cfg: DictConfig) -> list[str]:
    """What speaks against what `launch` says of hangs.

    Args:
        cfg: the resolved configuration.
    """
    launch = cfg.launch
    problems = []
    timeout = launch.hang_timeout
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and timeout != AUTO and not (is_number and timeout > 0):
        problems.append(
            f"launch.hang_timeout={timeout}: must be auto (learned), a number of seconds above 0, or null (off)"
        )
    if launch.hang_safety_factor < 1:
        problems.append(
            f"launch.hang_safety_factor={launch.hang_safety_factor:g}: must be at least 1, or what took long once "
            "would be a hang the next time; type launch.hang_safety_factor=5"
        )
    for name in ("hang_floor_seconds", "hang_first_timeout"):
        if launch[name] <= 0:
            problems.append(f"launch.{name}={launch[name]:g}: must be a number of seconds above 0")
    return problems
