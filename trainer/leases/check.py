"""What cannot be had where workers lease their samples: before a process starts, and as a Trainer is set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from trainwright.core.config.option_rules import Rule, broken_rules

_RULES: dict[str, Rule] = {
    "val_check_interval": (
        lambda value: value is None or (isinstance(value, float) and value == 1.0),
        "1.0, since workers that lease samples meet at the end of an epoch only",
    ),
    "limit_train_batches": (
        lambda value: not isinstance(value, float) or value in (0.0, 1.0),
        "a whole number with leases, micro-batches of each worker on average",
    ),
    "data_partition": (
        lambda value: value == "interleave",
        "interleave with leases, which say who reads what",
    ),
    "uneven_steps": (lambda value: not value, "False with leases, of which each is a step of one worker"),
}


def option_problems(given: Mapping[str, Any]) -> list[str]:
    """What speaks against leases in options of the Trainer, given by name, one text each."""
    return broken_rules(_RULES, given)


def lease_problems(cfg: DictConfig) -> Iterator[str]:
    """What speaks against leases in a resolved configuration whose strategy is to lease.

    Args:
        cfg: the configuration.
    """
    yield from (f"trainer.{problem}" for problem in option_problems(cfg.trainer))
    for name, callback in cfg.checkpoint.items():
        every = callback.get("every_n_steps") if isinstance(callback, DictConfig) else None
        if every is not None:
            yield (
                f"checkpoint.{name}.every_n_steps={every} with strategy.leases={cfg.strategy.leases}: workers make "
                f"unequal numbers of steps; type checkpoint.{name}.every_n_epochs=1"
            )
