"""Checks of the strategy's options, and of the batch sizes against its layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from omegaconf import DictConfig

from trainwright.core.global_batch import solve_accumulation
from trainwright.strategies.compose.world import layout_problem
from trainwright.strategies.contract.options import PlannedRun, StrategyOptions


def strategy_problems(cfg: DictConfig, run: PlannedRun, options: StrategyOptions | None) -> Iterator[str]:
    """Yield the problems of the strategy: option values, layout, and other parts of the run."""
    if "_target_" not in cfg.strategy:
        yield "strategy: has no class; a yaml of the group strategy needs _target_: package.module.Class"
    if options is None:
        return
    if run.world_size is not None:
        yield from layout_problem(options, run.world_size)
    yield from options.problems()
    if run.layout is not None:
        yield from options.layout_problems(run.layout)
    yield from options.run_problems(run)


def batch_problems(cfg: DictConfig, run: PlannedRun, options: StrategyOptions | None) -> list[str]:
    """Return the problems of the global batch size on the ranks that share it."""
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
    """Return the number of data-parallel ranks; all ranks if only the class knows the layout."""
    if options is None:
        return run.world_size
    return None if run.layout is None else run.layout.data_ranks


def pipeline_batch_problems(cfg: DictConfig, run: PlannedRun, options: StrategyOptions | None) -> list[str]:
    """Return the problems of splitting a data rank's batch into the micro-batches of a pipeline."""
    size, parts = cfg.micro_batch_size, least_micro_batch(run, options)
    if size is None or size < 1 or size >= parts:  # less than 1 is refused as a number
        return []
    return [too_few_samples(size, parts, None if cfg.strategy.micro_batches is not None else cfg.strategy.schedule)]


def least_micro_batch(run: PlannedRun, options: StrategyOptions | None) -> int:
    """Return the least number of samples per data rank and micro-batch."""
    return 1 if options is None or run.layout is None else options.least_batch(run.layout)


def too_few_samples(size: int, parts: int, default_of: str | None) -> str:
    """Return the error of a pipeline with fewer samples than micro-batches.

    Args:
        size: samples that a data rank reads at a time.
        parts: micro-batches that they are split into.
        default_of: schedule whose default ``parts`` is; ``None``: it was given.
    """
    how = "" if default_of is None else f", the default of schedule={default_of}"
    return (
        f"micro_batch_size={size} with strategy.micro_batches={parts}{how}: a pipeline splits the micro_batch_size "
        f"samples of a data rank into that many parts, so each needs a sample; type micro_batch_size={parts}"
    )


def model_problems(cfg: DictConfig, run: PlannedRun, options: StrategyOptions | None) -> Iterator[str]:
    """Yield the problems of the layout with the module itself; builds the module only if the strategy needs it."""
    if options is None or "_target_" not in cfg.module:
        return

    @cache
    def build() -> object:
        from trainwright.strategies.compose.meta_module import meta_module

        return meta_module(cfg)

    yield from options.module_problems(run, build)
