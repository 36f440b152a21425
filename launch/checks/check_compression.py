"""Checks of gradient compression before any process starts."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.options import class_of
from trainwright.core.layout import Layout
from trainwright.strategies.averaging.compression.options import (
    CompressionChoice,
    choose_compression,
    compression_problems,
    message_options,
    nothing_to_compress,
    scaled_steps_problem,
)
from trainwright.strategies.contract.options import StrategyOptions

_ADAM = ("Adam", "AdamW")


def compression_refusals(cfg: DictConfig, options: StrategyOptions | None, layout: Layout | None) -> list[str]:
    """Return the problems of `compression`.

    Args:
        cfg: the resolved configuration.
        options: of the strategy; None = of a class outside this project.
        layout: with all sizes resolved; None = unknown, or refused elsewhere.
    """
    given = compression_of(cfg, options)
    problems = compression_problems(given)
    choice = None if problems else choose_compression(given)
    return problems if choice is None else [*problems, *_choice_problems(cfg, choice, options, layout)]


def compression_of(cfg: DictConfig, options: StrategyOptions | None) -> dict[str, Any]:
    """Return the argument `compression` of a strategy, from the group of that name."""
    plain: Any = OmegaConf.to_container(cfg.compression)
    return dict(plain) if options is None or options.averages_gradients else message_options(plain)


def _choice_problems(
    cfg: DictConfig, choice: CompressionChoice, options: StrategyOptions | None, layout: Layout | None
) -> Iterator[str]:
    if options is None:
        yield (
            f"compression={choice.name} with {cfg.strategy.get('_target_') or 'a strategy without class'}: only the "
            "strategies of this project, and those that are built on them, compress; type strategy=ddp, or "
            "compression=none"
        )
        return
    if not options.averages_gradients:
        return  # these send something other than gradients, and check compression themselves
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
