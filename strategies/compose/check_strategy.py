"""The strategy, by what its options know, and the samples of a step against its layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from omegaconf import DictConfig

from trainwright.core.global_batch import solve_accumulation
from trainwright.strategies.compose.world import layout_problem
from trainwright.strategies.contract.options import PlannedRun, StrategyOptions


def strategy_problems(cfg: DictConfig, run: PlannedRun, options: StrategyOptions | None) -> Iterator[str]:
    """What the options of the strategy refuse: values, the layout, and what stands beside them."""
    if "_target_" not in cfg.strategy:
        yield "strategy: names no class; a yaml of the group strategy needs _target_: package.module.Class"
    if options is None:
        return
    if run.world_size is not None:
        yield from layout_problem(options, run.world_size)
    yield from options.problems()
    if run.layout is not None:
        yield from options.layout_problems(run.layout)
    yield from options.run_problems(run)


def batch_problems(cfg: DictConfig, run: PlannedRun, options: StrategyOptions | None) -> list[str]:
    """The samples of a step against the ranks that share them."""
    if cfg.global_batch_size is None:
        return []
    if cfg.accumulation.steps is not None:
        return [
            f"global_batch_size={cfg.global_batch_size} and accumulation.steps={cfg.accumulation.steps}: each decides "
            "the other; leave one out (accumulation=auto, or global_batch_size=null)"
        ]
    ranks = _data_ranks(run, options)
    if cfg.micro_batch_size is None or min(cfg.micro_batch_size, cfg.global_batch_size) < 1 or ranks is None:
        return []
    try:
        solve_accumulation(cfg.global_batch_size, cfg.micro_batch_size, ranks, uneven=cfg.trainer.uneven_steps)
    except ValueError as error:
        return [str(error)]
    return []


def _data_ranks(run: PlannedRun, options: StrategyOptions | None) -> int | None:
    """Ranks that read different samples; all of them, where only the class knows the layout."""
    if options is None:
        return run.world_size
    return None if run.layout is None else run.layout.data_ranks


def pipeline_batch_problems(cfg: DictConfig, run: PlannedRun, options: StrategyOptions | None) -> list[str]:
    """A data rank's batch against the micro-batches that a pipeline splits it into."""
    size, parts = cfg.micro_batch_size, least_micro_batch(run, options)
    if size is None or size < 1 or size >= parts:  # less than 1 is refused as a number
        return []
    return [too_few_samples(size, parts, None if cfg.strategy.micro_batches is not None else cfg.strategy.schedule)]


def least_micro_batch(run: PlannedRun, options: StrategyOptions | None) -> int:
    """Samples that a data rank must read at a time."""
    return 1 if options is None or run.layout is None else options.least_batch(run.layout)


def too_few_samples(size: int, parts: int, default_of: str | None) -> str:
    """The problem of a pipeline that splits fewer samples than it has micro-batches.

    Args:
        size: samples that a data rank reads at a time.
        parts: micro-batches that these are split into.
        default_of: schedule whose default that is; ``None``: it was asked for.
    """
    how = "" if default_of is None else f", the default of schedule={default_of}"
    return (
        f"micro_batch_size={size} with strategy.micro_batches={parts}{how}: a pipeline splits the micro_batch_size "
        f"samples of a data rank into that many parts, so each needs a sample; type micro_batch_size={parts}"
    )


def model_problems(cfg: DictConfig, run: PlannedRun, options: StrategyOptions | None) -> Iterator[str]:
    """The layout against the module itself; imports torch, so only where the strategy asks for the module."""
    if options is None or "_target_" not in cfg.module:
        return

    @cache
    def build() -> object:
        from trainwright.strategies.compose.check_layout import meta_module

        return meta_module(cfg)

    yield from options.module_problems(run, build)
