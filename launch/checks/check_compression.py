"""Where gradients cannot be compressed, as far as it can be told before a process starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.targets import class_of
from trainwright.core.layout import Layout
from trainwright.strategies.averaging.compression.options import (
    ONLY_OF_AVERAGES,
    CompressionChoice,
    choose_compression,
    compression_problems,
    compressor_names,
    nothing_to_compress,
    option_defaults,
    scaled_steps_problem,
)

_OURS = "trainwright.strategies."
_SYNCHRONOUS = ("DDPStrategy", "ZeroStrategy", "HybridStrategy", "SingleDeviceStrategy")
_ADAM = ("Adam", "AdamW")


def compression_refusals(cfg: DictConfig, layout: Layout | None) -> list[str]:
    """What speaks against `compression`.

    Args:
        cfg: the resolved configuration.
        layout: closed; None = not known, or refused elsewhere.
    """
    given = compression_of(cfg)
    problems = compression_problems(given)
    choice = None if problems else choose_compression(given)
    return problems if choice is None else [*problems, *_beside(cfg, choice, layout)]


def compression_of(cfg: DictConfig) -> dict[str, Any]:
    """The argument `compression` of a strategy, from the group of that name.

    A strategy that does not average gradients has no warm-up with dense ones, nor steps of Adam to send: it gets none
    of these options unless one was typed, which it refuses.
    """
    plain: Any = OmegaConf.to_container(cfg.compression)
    given = dict(plain)
    if not _averages_gradients(cfg) and given["name"] in compressor_names():
        defaults = option_defaults(given["name"])
        for option in ONLY_OF_AVERAGES:
            if given.get(option) == defaults.get(option):
                given.pop(option, None)
    return given


def _averages_gradients(cfg: DictConfig) -> bool:
    target = str(cfg.strategy.get("_target_", ""))
    return target.endswith(_SYNCHRONOUS) or ".one_axis." in target


def _beside(cfg: DictConfig, choice: CompressionChoice, layout: Layout | None) -> Iterator[str]:
    target = str(cfg.strategy.get("_target_", ""))
    if not target.startswith(_OURS):
        yield (
            f"compression={choice.name} with {target or 'a strategy without class'}: only the strategies of this "
            "project compress; type strategy=ddp, or compression=none"
        )
        return
    if not _averages_gradients(cfg):
        return  # others send something else, and say themselves what they take
    if layout is not None and layout.replicate == 1:
        yield nothing_to_compress(choice.name)
    if not choice.needs_adam:
        return
    if cfg.precision == "16-mixed":
        yield scaled_steps_problem(choice)
    optimizer = class_of(cfg.optimizer)
    if optimizer and optimizer not in _ADAM:
        yield (
            f"{choice.asked} with the optimizer {optimizer}: the scheme is that of Adam's momentum and variance; "
            f"type optimizer=adamw, or {choice.instead.removeprefix('type ')} or compression=powersgd, which serve any "
            "optimizer"
        )
