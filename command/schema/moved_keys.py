"""Keys that have moved, and still work."""

import logging

from omegaconf import DictConfig

_log = logging.getLogger(__name__)
# Old key under `module` -> new key under `schedule`.
_MOVED = {"warmup_steps": "warmup", "schedule_steps": "total_steps", "final_lr_factor": "final_factor"}


def move_keys(cfg: DictConfig) -> None:
    """Move values of a recipe's old schedule keys to ``schedule``, and warn about what to type.

    With ``schedule=none`` they stay arguments of the module, which then has its own schedule.
    """
    if cfg.schedule.shape == "none":
        return
    for old, new in _MOVED.items():
        given = cfg.module.get(old)
        if given is not None:
            cfg.schedule[new], cfg.module[old] = given, None
            _log.warning("module.%s is deprecated. Type schedule.%s=%s", old, new, given)
