"""All checks of a configuration before any process starts, in one pass.

Each check is a function from the configuration to a list of problems: the given value, what is allowed, and what to
type instead. `validate` runs all of them.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator

from omegaconf import DictConfig, OmegaConf

from trainwright.callbacks.guard.options import guard_refusals
from trainwright.callbacks.inject.sentences import inject_problems
from trainwright.callbacks.schedule.schedules import schedule_problems
from trainwright.core.config.missing import missing_values, resolved, without_missing
from trainwright.core.config.targets import problem_of_target, targets_in
from trainwright.core.device_profiles import profile_problems
from trainwright.core.problems import ConfigError
from trainwright.launch.checks.check_bounds import bound_problems
from trainwright.launch.checks.check_run import (
    callback_problems,
    compression_refusals,
    data_problems,
    device_problems,
    end_problems,
    launch_problems,
    logger_problems,
    module_problems,
    name_problems,
    run_dir_problems,
    with_compression,
)
from trainwright.launch.checks.check_targets import argument_problems, hook_problems
from trainwright.launch.engines import engines
from trainwright.launch.engines.engines import variable_problems
from trainwright.launch.outcome.interruption import preemption_refusals
from trainwright.launch.recovery.check_recovery import recovery_problems, restart_problems
from trainwright.launch.recovery.check_resume import resume_problems
from trainwright.strategies.compose.check_strategy import (
    batch_problems,
    least_micro_batch,
    model_problems,
    pipeline_batch_problems,
    strategy_problems,
)
from trainwright.strategies.compose.world import Surroundings, num_data_ranks, options_of, planned_run
from trainwright.strategies.contract.options import PlannedRun, StrategyOptions
from trainwright.trainer.balance.check import balance_problems
from trainwright.trainer.loop.loss_scale import loss_scale_problems


def validate(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """Return all problems of a composed configuration with a run directory; empty when it can run.

    Args:
        cfg: as `compose` returns it, with `run_dir` set.
        surroundings: the verb and the launcher.
    """
    absent = [str(key) for key in cfg if OmegaConf.is_missing(cfg, key)]
    problems, cfg = missing_values(cfg), without_missing(cfg)
    try:
        plain = resolved(cfg)
    except ConfigError as error:
        return [*problems, *error.problems]
    problems += variable_problems(cfg)
    bounds = bound_problems(cfg, absent)
    if not _DECISIVE.isdisjoint(bounds):
        return [*problems, *bounds.values()]
    options = with_compression(plain, options_of(plain.strategy))
    run = planned_run(plain, surroundings, options)
    for check in _checks(plain, surroundings, run, options):
        try:
            problems += check()
        except Exception:
            if not (problems or bounds):
                raise
            # The check met a value that has been refused already.
    missing_code = list(_targets(plain))
    problems += missing_code
    problems += [text for key, text in bounds.items() if not any(said.startswith(f"{key}=") for said in problems)]
    if not missing_code and not bounds:
        problems += model_problems(plain, run, options)
    return problems + _own_checks(plain, run, in_order=not problems)


def problems_before_layout(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """Return the problems that make choosing a layout pointless; the strategy is not checked.

    Args:
        cfg: as `compose` returns it, with `run_dir` set.
        surroundings: the verb and the launcher.
    """
    problems = missing_values(cfg)
    cfg = without_missing(cfg)
    cfg.strategy = {}
    bounds = bound_problems(cfg)
    if bounds:
        return [*problems, *bounds.values()]
    if isinstance(cfg.micro_batch_size, str):
        cfg.micro_batch_size = None
    try:
        cfg = resolved(cfg)
    except ConfigError as error:
        return [*problems, *error.problems]
    problems += [*module_problems(cfg), *name_problems(cfg)]
    problems += [*device_problems(cfg, surroundings), *launch_problems(cfg, surroundings)]
    return [*problems, *_targets(cfg)]


def _targets(cfg: DictConfig) -> Iterator[str]:
    seen: list[object] = []
    # A group that another refers to is found twice; the shorter key is the one to type.
    for key, node in sorted(targets_in(OmegaConf.to_container(cfg)), key=lambda item: item[0].count(".")):
        problem = None if node in seen else problem_of_target(key, node["_target_"])
        seen.append(node)
        if problem is not None:
            yield problem


def _own_checks(cfg: DictConfig, run: PlannedRun, in_order: bool) -> list[str]:
    """Run the checks of recipe and strategy, even after other problems, so that all are reported at once."""
    try:
        ranks = 1 if run.world_size is None else num_data_ranks(cfg, run.world_size)
    except ValueError:
        ranks = 1  # the layout has been refused; checks that do not depend on it still run
    problems: list[str] = []
    for path in (*cfg.checks, *(cfg.strategy.get("checks") or ())):
        module, _, name = str(path).partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            problems.append(f"checks: {path} cannot be found ({error}); write package.module:function")
            continue
        try:
            problems += function(cfg, ranks)
        except Exception:
            if in_order:
                raise
            # The check met a value that has been refused already.
    return problems


def _checks(
    cfg: DictConfig, surroundings: Surroundings, run: PlannedRun, options: StrategyOptions | None
) -> list[Callable[[], Iterable[str]]]:
    """Return the checks in order; each may meet values that another one has refused."""
    verb, layout = run.verb, run.layout
    return [
        lambda: module_problems(cfg),
        lambda: hook_problems(cfg, verb),
        lambda: argument_problems(cfg),
        lambda: callback_problems(cfg),
        lambda: logger_problems(cfg),
        lambda: name_problems(cfg),
        lambda: device_problems(cfg, surroundings),
        lambda: profile_problems(cfg),
        lambda: launch_problems(cfg, surroundings),
        lambda: end_problems(cfg, verb),
        lambda: run_dir_problems(cfg, verb),
        lambda: resume_problems(cfg, verb),
        lambda: restart_problems(cfg, verb, surroundings.world_size is not None and not engines.uses_engine(cfg)),
        lambda: preemption_refusals(cfg, verb),
        lambda: guard_refusals(cfg),
        lambda: schedule_problems(cfg),
        lambda: data_problems(cfg),
        lambda: loss_scale_problems(dict(cfg.trainer.loss_scale), cfg.precision),
        lambda: strategy_problems(cfg, run, options),
        lambda: batch_problems(cfg, run, options),
        lambda: pipeline_batch_problems(cfg, run, options),
        lambda: balance_problems(cfg, options, layout, least_micro_batch(run, options)),
        lambda: compression_refusals(cfg, options),
        lambda: recovery_problems(cfg, verb, options, layout, run.has_launcher),
        lambda: inject_problems(cfg, verb, run.world_size, 0 if options is None else options.serving_ranks),
    ]


# Out of bounds, these leave nothing to check, or would let checks loop for hours.
_DECISIVE = {"devices", "nodes", "strategy", "accumulation", "compression"}
