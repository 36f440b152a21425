"""Everything that can be known to be wrong before a process starts, found in one pass.

Each check is a function from the configuration to a list of problems, each with what was given, what is allowed and
what to type instead. `validate` runs them all and hands back all that they found.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.callbacks.guard.check import guard_refusals
from trainwright.callbacks.inject.words import inject_problems
from trainwright.core.config.missing import missing_values, resolved, without_missing
from trainwright.core.config.targets import problem_of_target, targets_in
from trainwright.core.device_profiles import profile_problems
from trainwright.core.problems import ConfigError
from trainwright.launch.checks.check_bounds import bound_problems
from trainwright.launch.checks.check_communication import communication_refusals
from trainwright.launch.checks.check_compression import compression_refusals
from trainwright.launch.checks.check_devices import device_problems, launch_problems
from trainwright.launch.checks.check_local_updates import local_update_refusals, local_update_refusals_of_module
from trainwright.launch.checks.check_parameter_server import parameter_server_problems
from trainwright.launch.checks.check_placement import placement_refusals
from trainwright.launch.checks.check_run_dir import run_dir_problems
from trainwright.launch.checks.check_values import (
    callback_problems,
    data_problems,
    end_problems,
    module_problems,
    number_problems,
    word_problems,
)
from trainwright.launch.engines import engines
from trainwright.launch.engines.engines import variable_problems
from trainwright.launch.outcome.ending import preemption_refusals
from trainwright.launch.recovery.check_recovery import recovery_problems
from trainwright.launch.recovery.check_restarts import restart_problems
from trainwright.launch.recovery.check_resume import resume_problems
from trainwright.launch.watchdog.check_hangs import hang_problems
from trainwright.strategies.compose.check_strategy import (
    batch_problems,
    cut_problems,
    hybrid_problems,
    layout_problems,
    least_micro_batch,
    model_problems,
    option_problems,
    pipeline_batch_problems,
    sequence_problems,
)
from trainwright.strategies.compose.world import (
    Surroundings,
    closed_layout,
    has_world_size,
    num_data_ranks,
    resolve_devices,
    server_ranks,
    tells_layout,
    world_size_of,
)
from trainwright.trainer.balance.check import balance_problems
from trainwright.trainer.loop.loss_scale import loss_scale_problems


def validate(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """All problems of a composed configuration whose run directory is decided; empty when it can run.

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
    for check in _CHECKS:
        try:
            problems += check(plain, surroundings)
        except Exception:
            if not (problems or bounds):
                raise
            # It met a value that has been refused already.
    missing_code = list(_targets(plain))
    problems += missing_code
    problems += [text for key, text in bounds.items() if not any(said.startswith(f"{key}=") for said in problems)]
    if not missing_code and not bounds:
        problems += model_problems(plain, surroundings)
        problems += local_update_refusals_of_module(plain, surroundings.verb)
    return problems + _own_checks(plain, surroundings, in_order=not problems)


def problems_before_layout(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """Those problems that leave nothing to choose a layout for; the strategy is not looked at.

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
    for check in (module_problems, number_problems, word_problems, device_problems, launch_problems):
        problems += check(cfg, surroundings)
    return [*problems, *_targets(cfg)]


def _targets(cfg: DictConfig) -> Iterator[str]:
    for key, target in targets_in(OmegaConf.to_container(cfg)):
        problem = problem_of_target(key, target)
        if problem is not None:
            yield problem


def _own_checks(cfg: DictConfig, surroundings: Surroundings, in_order: bool) -> list[str]:
    """Run the checks of recipe and strategy, even when something else is wrong, so that all is said at once."""
    try:
        ranks = num_data_ranks(cfg, world_size_of(cfg, surroundings)) if has_world_size(cfg) else 1
    except ValueError:
        ranks = 1  # the layout has been refused; what does not depend on it is still worth saying
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
            # It met a value that has been refused already.
    return problems


# ---------------------------------------------------------------------------------------------------------------------
# What the checks are told


def _balance(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return balance_problems(cfg, closed_layout(cfg, surroundings), least_micro_batch(cfg, surroundings))


def _compression(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return compression_refusals(cfg, closed_layout(cfg, surroundings))


def _communication(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    devices = resolve_devices(cfg) if has_world_size(cfg) else None
    return communication_refusals(cfg, closed_layout(cfg, surroundings), devices)


def _device_profile(cfg: DictConfig, _: Surroundings) -> list[str]:
    return profile_problems(cfg)


def _resume(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return resume_problems(cfg, surroundings.verb)


def _inject(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    world_size = world_size_of(cfg, surroundings) if has_world_size(cfg) else None
    return inject_problems(cfg, surroundings.verb, world_size, server_ranks(cfg))


def _restarts(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return restart_problems(cfg, surroundings.verb, has_launcher=_restarts_ranks_itself(cfg, surroundings))


def _restarts_ranks_itself(cfg: DictConfig, surroundings: Surroundings) -> bool:
    """Whether whoever has started the ranks was told by the user, and not by `launch`, how often to do so."""
    return surroundings.world_size is not None and not engines.uses_engine(cfg)


def _preemption(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return preemption_refusals(cfg, surroundings.verb)


def _recovery(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    layout, has_launcher = closed_layout(cfg, surroundings), surroundings.world_size is not None
    return recovery_problems(cfg, surroundings.verb, layout, has_launcher, tells_layout(cfg.strategy))


def _local_updates(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return local_update_refusals(cfg, surroundings.verb, closed_layout(cfg, surroundings))


def _hangs(cfg: DictConfig, _: Surroundings) -> list[str]:
    return hang_problems(cfg)


def _guard(cfg: DictConfig, _: Surroundings) -> list[str]:
    return guard_refusals(cfg)


def _parameter_server(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return parameter_server_problems(cfg, world_size_of(cfg, surroundings) if has_world_size(cfg) else None)


def _placement(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return placement_refusals(cfg, surroundings.verb)


def _loss_scale(cfg: DictConfig, _: Surroundings) -> list[str]:
    given: Any = OmegaConf.to_container(cfg.trainer.loss_scale)
    return loss_scale_problems(given, cfg.precision)


# Out of bounds, they leave nothing that the checks could say, or let them count for hours.
_DECISIVE = {"devices", "nodes", "strategy", "accumulation", "compression"}
_CHECKS: tuple[Callable[[DictConfig, Surroundings], list[str]], ...] = (
    module_problems,
    callback_problems,
    number_problems,
    word_problems,
    device_problems,
    _device_profile,
    launch_problems,
    layout_problems,
    batch_problems,
    option_problems,
    hybrid_problems,
    pipeline_batch_problems,
    _balance,
    _compression,
    _communication,
    _local_updates,
    sequence_problems,
    cut_problems,
    end_problems,
    run_dir_problems,
    _resume,
    _restarts,
    _recovery,
    _hangs,
    _preemption,
    _guard,
    _parameter_server,
    _placement,
    data_problems,
    _loss_scale,
    _inject,
)
