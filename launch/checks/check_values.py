"""Keys by themselves: whether each has a value that it may have."""

from typing import Any

from omegaconf import DictConfig

from trainwright.core.problems import did_you_mean
from trainwright.launch.engines import engines
from trainwright.launch.recovery.check_recovery import RECOVERIES
from trainwright.launch.schema import ACCELERATORS, PARTITIONS, PRECISIONS
from trainwright.strategies.compose.world import Surroundings, has_world_size


def module_problems(cfg: DictConfig, _: Surroundings) -> list[str]:
    """Whether there is a module."""
    if "_target_" in cfg.module:
        return []
    return ["module: names no class; the recipe sets it: module: {_target_: package.module.YourLightningModule}"]


def callback_problems(cfg: DictConfig, _: Surroundings) -> list[str]:
    """Callbacks and loggers that name no class."""
    return [
        f"{group}.{name}: names no class; write _target_: package.module.Class, or {group}.{name}=null to leave it out"
        for group in ("callbacks", "checkpoint", "monitor", "guard", "logger")
        for name, value in cfg[group].items()
        if value is not None and not (isinstance(value, DictConfig) and "_target_" in value)
    ]


def number_problems(cfg: DictConfig, _: Surroundings) -> list[str]:
    """Numbers whose bounds the schema does not know, and the name."""
    problems = []
    if cfg.nodes >= 1 and not has_world_size(cfg):
        problems.append(f"devices={cfg.devices}: must be a whole number of at least 1, or auto; type devices=1")
    if cfg.accumulation.steps is not None and cfg.accumulation.steps < 1:
        problems.append(f"accumulation.steps={cfg.accumulation.steps}: must be at least 1; 1 is no accumulation")
    if not str(cfg.name).strip() or any(sign in str(cfg.name) for sign in "/\\\0") or cfg.name in (".", ".."):
        problems.append(f"name={cfg.name!r}: becomes the name of a directory; type letters, digits, - and _")
    return problems


def word_problems(cfg: DictConfig, _: Surroundings) -> list[str]:
    """Words that are none of those that a key takes."""
    words: list[tuple[str, Any, tuple[str | int, ...], str]] = [
        ("accelerator", cfg.accelerator, ACCELERATORS, "accelerators"),
        ("precision", cfg.precision, PRECISIONS, "precisions"),
        ("launch.kind", cfg.launch.kind, ("local", "torchrun", *engines.kinds()), "kinds"),
        ("launch.recovery", cfg.launch.recovery, RECOVERIES, "choices"),
    ]
    words.append(("trainer.data_partition", cfg.trainer.data_partition, PARTITIONS, "partitions"))
    algorithm = cfg.trainer.gradient_clip_algorithm
    if algorithm is not None:
        words.append(("trainer.gradient_clip_algorithm", algorithm, ("norm", "value"), "algorithms"))
    return [
        f"{key}={given}: unknown; {did_you_mean(str(given), [str(word) for word in allowed], kind)}"
        for key, given, allowed, kind in words
        if given not in allowed
    ]


def data_problems(cfg: DictConfig, _: Surroundings) -> list[str]:
    """Options of how data are dealt out that have no effect."""
    trainer = cfg.trainer
    if trainer.data_key is not None and trainer.data_partition != "hash":
        return [
            f"trainer.data_key={trainer.data_key} with trainer.data_partition={trainer.data_partition}: only hash asks "
            "for keys; type trainer.data_partition=hash, or leave trainer.data_key out"
        ]
    return []


def end_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """Training that never ends."""
    limited = cfg.max_steps is not None or cfg.max_epochs is not None or cfg.trainer.max_time is not None
    if surroundings.verb != "fit" or limited or cfg.trainer.fast_dev_run:
        return []
    return ["max_steps and max_epochs are both null, so the run would never end; type max_steps=1000 or max_epochs=10"]
