"""The option `monitor.profile=[10,20]`."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

_KEY = "monitor.profile"
_TARGET = "trainwright.callbacks.monitor.trace.profile.Profile"


def profile_problem(steps: Any, otherwise: str) -> str | None:
    """Return what is wrong with the steps of a trace, ``None`` if nothing is; ``otherwise`` names other values."""
    if isinstance(steps, Sequence) and not isinstance(steps, str) and len(steps) == 2:
        whole = all(isinstance(each, int) and not isinstance(each, bool) for each in steps)
        if whole and 0 <= steps[0] < steps[1]:
            return None
    return f"{steps} (allowed: two whole numbers, the first step and the one after the last, like [10,20]; {otherwise})"


def expand_profile(cfg: DictConfig) -> list[str]:
    """Replace the steps by the callback; `[]` is a trace only on request.

    Args:
        cfg: composed; changed. Anything but a list stays.

    Returns:
        What is wrong with the steps.
    """
    given = OmegaConf.select(cfg, _KEY)
    if not isinstance(given, ListConfig):
        return []
    steps = list(given)
    node = {"_target_": _TARGET, "steps": steps or None, "run_dir": "${run_dir}"}
    OmegaConf.update(cfg, _KEY, node, merge=False, force_add=True)
    problem = profile_problem(steps, "[] = only when a running job is asked; null = off") if steps else None
    return [] if problem is None else [f"{_KEY}={problem}"]
