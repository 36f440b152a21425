"""Everything that can be known to be wrong before a process starts, found in one pass.

Each check is a function from the configuration to a list of problems, each with what was given, what is allowed and
what to type instead. `validate` runs them all and hands back all that they found.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trainwright.strategies.communication.options import WORDS as COMMUNICATION_WORDS
from trainwright.strategies.hybrid_rules import (
    averaging_problem,
    cuts_module,
    length_problems,
    micro_batches_for,
    optimizer_problem,
    sync_batchnorm_problem,
    validate_hybrid,
)
from trainwright.strategies.layout import Layout
from trainwright.trainer.batch import solve_accumulation
from trainwright.trainer.candidates import AUTO
from trainwright.trainer.check_balance import balance_problems
from trainwright.trainer.check_communication import communication_refusals
from trainwright.trainer.check_compression import compression_refusals
from trainwright.trainer.check_guard import guard_refusals
from trainwright.trainer.check_hangs import hang_problems
from trainwright.trainer.check_local_updates import local_update_refusals, local_update_refusals_of_module
from trainwright.trainer.check_parameter_server import parameter_server_problems, server_ranks
from trainwright.trainer.check_placement import placement_refusals
from trainwright.trainer.check_recovery import RECOVERIES, recovery_problems
from trainwright.trainer.check_restarts import restart_problems
from trainwright.trainer.check_resume import resume_problems
from trainwright.trainer.config import ACCELERATORS, PARTITIONS, PRECISIONS
from trainwright.trainer.inject_words import inject_problems
from trainwright.trainer.launch import engines
from trainwright.trainer.launch.ending import preemption_refusals
from trainwright.trainer.loss_scale import loss_scale_problems
from trainwright.trainer.machine import num_gpus, port_is_taken
from trainwright.trainer.planning.profiles import profile_problems
from trainwright.trainer.problems import did_you_mean
from trainwright.trainer.run_directory import holds_run
from trainwright.trainer.targets import class_of, lineage, problem_of_target, targets_in

VERBS = ("fit", "validate", "test", "predict")
# Layouts of strategies that have no options for one, and of classes that build on them.
_LAYOUTS = {
    "SingleDeviceStrategy": Layout(),
    "DDPStrategy": Layout(replicate=-1),
    "ParameterServerStrategy": Layout(replicate=-1),
}
# Lightning's; their subclasses are refused by the ranks.
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


@dataclass(frozen=True)
class Surroundings:
    """What a configuration is held against.

    Attributes:
        verb: fit, validate, test or predict.
        world_size: number of ranks that torchrun or SLURM has started; None when this command starts them.
        local_world_size: number of these on a machine; None as above, or where it does not matter.
    """

    verb: str = "fit"
    world_size: int | None = None
    local_world_size: int | None = None


def validate(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """All problems of a composed configuration whose run directory is decided; empty when it can run.

    Args:
        cfg: as `compose` returns it, with `run_dir` set.
        surroundings: the verb and the launcher.
    """
    problems = _missing_values(cfg)
    cfg = _without_missing(cfg)
    try:
        plain = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        return [*problems, f"the configuration refers to what is not there: {str(error).splitlines()[0]}"]
    resolved = OmegaConf.create(plain)
    assert isinstance(resolved, DictConfig)
    for check in _CHECKS:
        problems += check(resolved, surroundings)
    missing_code = list(_targets(plain))
    problems += missing_code
    if not missing_code:
        problems += _model(resolved, surroundings)
        problems += local_update_refusals_of_module(resolved, surroundings.verb)
    return problems + _own_checks(resolved, surroundings, in_order=not problems)


def problems_before_layout(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """Those problems that leave nothing to choose a layout for; the strategy is not looked at.

    Args:
        cfg: as `compose` returns it, with `run_dir` set.
        surroundings: the verb and the launcher.
    """
    problems = _missing_values(cfg)
    cfg = _without_missing(cfg)
    cfg.strategy = {}
    if isinstance(cfg.micro_batch_size, str):
        cfg.micro_batch_size = None
    try:
        plain = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        return [*problems, f"the configuration refers to what is not there: {str(error).splitlines()[0]}"]
    resolved = OmegaConf.create(plain)
    assert isinstance(resolved, DictConfig)
    for check in (_module_given, _whole_numbers, _known_words, _devices_there, _launcher):
        problems += check(resolved, surroundings)
    return [*problems, *_targets(plain)]


def resolve_devices(cfg: DictConfig) -> int:
    """Ranks on this machine: `devices`, where auto is all GPUs, or one rank on the CPU."""
    if cfg.devices == "auto":
        return max(1, num_gpus()) if cfg.accelerator != "cpu" else 1
    return int(cfg.devices)


def layout_of(strategy: Any) -> Layout | None:
    """The layout that a strategy's configuration asks for; None for a class whose layout only it knows."""
    sizes = {axis.name: strategy[axis.name] for axis in fields(Layout) if axis.name in strategy}
    if sizes:
        return Layout(**sizes)
    names = (path.rpartition(".")[2] for path in lineage(str(strategy.get("_target_", ""))))
    return next((_LAYOUTS[name] for name in names if name in _LAYOUTS), None)


def num_data_ranks(cfg: DictConfig, world_size: int) -> int:
    """Ranks that read different samples, for a configuration that `validate` found possible.

    Args:
        cfg: the configuration.
        world_size: of all ranks, those that only serve included.
    """
    layout, training = layout_of(cfg.strategy), training_ranks(cfg, world_size)
    return layout.resolve(training).data_ranks if layout is not None else training


def training_ranks(cfg: DictConfig, world_size: int) -> int:
    """How many of so many ranks make up the layout: all that do not only serve."""
    return max(world_size - server_ranks(cfg), 1)  # too many servers are refused elsewhere


def world_size_of(cfg: DictConfig, surroundings: Surroundings) -> int:
    """Number of ranks of the run."""
    return surroundings.world_size or resolve_devices(cfg) * cfg.nodes


def _missing_values(cfg: DictConfig) -> list[str]:
    missing = sorted(_missing_keys(OmegaConf.to_container(cfg, resolve=False)))
    if "name" in missing:
        return ["name has no value; the recipe sets it, for example name: mine (its runs then lie under runs/mine/)"]
    return [f"{key} has no value, but {cfg.name} needs one; type {key}=..." for key in missing]


def _missing_keys(node: Any, path: str = "") -> Iterator[str]:
    """Dotted keys whose own value is missing. (OmegaConf.missing_keys fails where another refers to nothing.)"""
    if node == MISSING:
        yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in children:
        here = f"[{key}]" if isinstance(node, list) else f".{key}" if path else str(key)
        yield from _missing_keys(value, path + here)


def _without_missing(cfg: DictConfig) -> DictConfig:
    """A copy with null in the place of missing values, so that the rest can be checked."""
    cfg = cfg.copy()
    with open_dict(cfg):
        for key in list(_missing_keys(OmegaConf.to_container(cfg, resolve=False))):
            OmegaConf.update(cfg, key, "unnamed" if key == "name" else None)
    return cfg


def _whole_numbers(cfg: DictConfig, _: Surroundings) -> list[str]:
    smallest = {"nodes": 1, "max_steps": 0, "max_epochs": 0, "global_batch_size": 1, "micro_batch_size": 1, "seed": 0}
    problems = [
        f"{key}={cfg[key]}: must be a whole number of at least {least}"
        + (", or null for no limit" if "max_" in key else "")
        for key, least in smallest.items()
        if cfg[key] is not None and cfg[key] < least
    ]
    if cfg.nodes >= 1 and not _has_world_size(cfg):
        problems.append(f"devices={cfg.devices}: must be a whole number of at least 1, or auto; type devices=1")
    if cfg.accumulation.steps is not None and cfg.accumulation.steps < 1:
        problems.append(f"accumulation.steps={cfg.accumulation.steps}: must be at least 1; 1 is no accumulation")
    if not str(cfg.name).strip() or any(sign in str(cfg.name) for sign in "/\\\0"):
        problems.append(f"name={cfg.name!r}: becomes the name of a directory; type letters, digits, - and _")
    return problems


def _known_words(cfg: DictConfig, _: Surroundings) -> list[str]:
    words: list[tuple[str, Any, tuple[str | int, ...], str]] = [
        ("accelerator", cfg.accelerator, ACCELERATORS, "accelerators"),
        ("precision", cfg.precision, PRECISIONS, "precisions"),
        ("launch.kind", cfg.launch.kind, ("local", "torchrun", *engines.kinds()), "kinds"),
        ("launch.recovery", cfg.launch.recovery, RECOVERIES, "choices"),
    ]
    for key, allowed in (
        ("communication", COMMUNICATION_WORDS),
        ("activation_checkpointing", ("none", "full", "selective")),
        ("offload", ("none", "optimizer", "parameters")),
        ("stage", (1, 2, 3)),
    ):
        if key in cfg.strategy:
            words.append((f"strategy.{key}", cfg.strategy[key], allowed, "choices"))
    words.append(("trainer.data_partition", cfg.trainer.data_partition, PARTITIONS, "partitions"))
    algorithm = cfg.trainer.gradient_clip_algorithm
    if algorithm is not None:
        words.append(("trainer.gradient_clip_algorithm", algorithm, ("norm", "value"), "algorithms"))
    return [
        f"{key}={given}: unknown; {did_you_mean(str(given), [str(word) for word in allowed], kind)}"
        for key, given, allowed, kind in words
        if given not in allowed
    ]


def _devices_there(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    if surroundings.world_size is not None or cfg.accelerator not in ("auto", "gpu") or engines.uses_engine(cfg):
        return []
    gpus = num_gpus()
    if gpus == 0:
        if cfg.accelerator == "auto":
            return []
        return ["accelerator=gpu: torch finds no GPU on this machine; type accelerator=cpu"]
    if cfg.devices == "auto" or not isinstance(cfg.devices, int) or cfg.devices <= gpus:
        return []
    counted = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return [f"devices={cfg.devices} on a machine with {counted}; type devices={gpus}, or accelerator=cpu"]


def _launcher(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    started = surroundings.world_size
    if started is None:
        return engines.engine_problems(cfg, surroundings.verb) if engines.uses_engine(cfg) else _own_launch(cfg)
    if cfg.devices == "auto" or not isinstance(cfg.devices, int) or started == cfg.devices * cfg.nodes:
        return []
    return [
        f"devices={cfg.devices} nodes={cfg.nodes} make {cfg.devices * cfg.nodes} rank(s), but the launcher has started "
        f"{started}; give both the same numbers, or type devices=auto to take what the launcher starts"
    ]


def _own_launch(cfg: DictConfig) -> list[str]:
    problems = []
    if cfg.launch.kind == "torchrun":
        problems.append(
            "launch=torchrun: no launcher has started this process; type torchrun --nproc-per-node="
            f"{cfg.devices} -m trainwright ... (or srun), or launch=local"
        )
    elif cfg.nodes > 1:
        problems.append(
            f"nodes={cfg.nodes}: this command starts the ranks of one machine; on several, type on each of them "
            f"torchrun --nnodes={cfg.nodes} --nproc-per-node={cfg.devices} -m trainwright ... (or use srun)"
        )
    port = cfg.launch.port
    if port is not None and not 1 <= port <= 65535:
        problems.append(f"launch.port={port}: must be 1 to 65535; leave it out to have a free one picked")
    elif port is not None and port_is_taken(port):
        problems.append(
            f"launch.port={port} is taken by another process on 127.0.0.1; leave launch.port out to have a free one "
            "picked"
        )
    return problems


def _has_world_size(cfg: DictConfig) -> bool:
    """Whether devices and nodes are possible numbers, so that a layout can be held against their product."""
    return cfg.nodes >= 1 and (cfg.devices == "auto" or (isinstance(cfg.devices, int) and cfg.devices >= 1))


def _layout(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    if not _has_world_size(cfg):
        return []  # refused as numbers
    world_size = world_size_of(cfg, surroundings)
    if str(cfg.strategy.get("_target_", "")).endswith("SingleDeviceStrategy"):
        if world_size == 1:
            return []
        return [
            f"strategy=single trains on one device, but devices={cfg.devices} nodes={cfg.nodes} make {world_size}; "
            "type devices=1, or strategy=ddp (or zero1, zero2, zero3)"
        ]
    try:
        layout = layout_of(cfg.strategy)
        if layout is not None:
            layout.resolve(training_ranks(cfg, world_size))
    except ValueError as error:
        return [str(error)]
    return []


def _batch(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    if cfg.global_batch_size is None:
        return []
    if cfg.accumulation.steps is not None:
        return [
            f"global_batch_size={cfg.global_batch_size} and accumulation.steps={cfg.accumulation.steps}: each decides "
            "the other; leave one out (accumulation=auto, or global_batch_size=null)"
        ]
    if cfg.micro_batch_size is None or min(cfg.micro_batch_size, cfg.global_batch_size) < 1:
        return []
    if not _has_world_size(cfg) or _layout(cfg, surroundings):
        return []  # without a layout there is no number of data ranks to divide by
    ranks = num_data_ranks(cfg, world_size_of(cfg, surroundings))
    try:
        solve_accumulation(cfg.global_batch_size, cfg.micro_batch_size, ranks, uneven=cfg.trainer.uneven_steps)
    except ValueError as error:
        return [str(error)]
    return []


def _strategy_options(cfg: DictConfig, _: Surroundings) -> list[str]:
    strategy, problems = cfg.strategy, []
    if "_target_" not in strategy:
        problems.append("strategy: names no class; a yaml of the group strategy needs _target_: package.module.Class")
    if strategy.get("offload") == "parameters" and strategy.get("stage") != 3:
        problems.append(
            f"strategy.offload=parameters with stage {strategy.get('stage')}: only stage 3 shards parameters; type "
            "strategy=zero3, or strategy.offload=optimizer"
        )
    if strategy.get("bucket_mib") is not None and strategy.bucket_mib <= 0:
        problems.append(
            f"strategy.bucket_mib={strategy.bucket_mib}: must be above 0 (MiB); leave it out for the default"
        )
    if strategy.get("find_unused_parameters") and strategy.get("stage") == 3 and "pipeline" not in strategy:
        problems.append(
            "strategy.find_unused_parameters=true with stage 3 has no effect: only stages 1 and 2 look for them; type "
            "strategy=zero2, or leave it out"
        )
    mode, modules = strategy.get("activation_checkpointing", "none"), strategy.get("checkpoint_modules")
    if mode == "selective" and not modules:
        problems.append(
            "strategy.activation_checkpointing=selective: which modules? Type "
            "'strategy.checkpoint_modules=[model.layers.*.mlp]', or activation_checkpointing=full for all blocks"
        )
    if mode in ("none", "full") and modules:
        problems.append(
            f"strategy.checkpoint_modules with activation_checkpointing={mode}: is read with selective only; type "
            "strategy.activation_checkpointing=selective, or leave strategy.checkpoint_modules out"
        )
    return problems


def closed_layout(cfg: DictConfig, surroundings: Surroundings) -> Layout | None:
    """The layout of a run with all sizes known; None if the strategy's is not known or cannot be had."""
    if not _has_world_size(cfg):
        return None
    try:
        layout = layout_of(cfg.strategy)
        return None if layout is None else layout.resolve(training_ranks(cfg, world_size_of(cfg, surroundings)))
    except ValueError:
        return None  # refused as a layout


def _tells_layout(strategy: Any) -> bool:
    """Whether the layout, possible or not, is known before a process starts."""
    try:
        return layout_of(strategy) is not None
    except ValueError:
        return True


def _is_hybrid(strategy: Any) -> bool:
    return all(axis.name in strategy for axis in fields(Layout))


def _hybrid_options(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    layout = closed_layout(cfg, surroundings)
    if layout is None or not _is_hybrid(cfg.strategy):
        return []
    return validate_hybrid(layout, _options_of(cfg.strategy), "strategy.")


def _options_of(strategy: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(strategy)
    return dict(plain)


def _pipeline_batch(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """A data rank's batch against the micro-batches that a pipeline splits it into."""
    layout = closed_layout(cfg, surroundings)
    size = cfg.micro_batch_size
    if layout is None or layout.pipeline == 1 or size is None or _hybrid_options(cfg, surroundings):
        return []
    parts = micro_batches_for(cfg.strategy.schedule, cfg.strategy.micro_batches, layout.pipeline)
    if parts <= size:
        return []
    how = "" if cfg.strategy.micro_batches is not None else f", the default of schedule={cfg.strategy.schedule}"
    return [
        f"micro_batch_size={size} with strategy.micro_batches={parts}{how}: a pipeline splits the micro_batch_size "
        f"samples of a data rank into that many parts, so each needs a sample; type micro_batch_size={parts}"
    ]


def _balance(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    layout = closed_layout(cfg, surroundings)
    least = 1
    if layout is not None and layout.pipeline > 1 and not _hybrid_options(cfg, surroundings):
        least = micro_batches_for(cfg.strategy.schedule, cfg.strategy.micro_batches, layout.pipeline)
    return balance_problems(cfg, layout, least)


def _compression(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return compression_refusals(cfg, closed_layout(cfg, surroundings))


def _communication(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    devices = resolve_devices(cfg) if _has_world_size(cfg) else None
    return communication_refusals(cfg, closed_layout(cfg, surroundings), devices)


def _sequence(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """The length of sequences against the ranks that split them, where module and data have it from one `seq_len`."""
    layout = closed_layout(cfg, surroundings)
    lengths = {OmegaConf.select(cfg, key) for key in ("module.seq_len", "module.config.seq_len", "data.seq_len")} - {
        None
    }
    if (
        layout is None
        or len(lengths) != 1
        or OmegaConf.select(cfg, "data.seq_len") is None
        or not _is_hybrid(cfg.strategy)
    ):
        return []
    length = lengths.pop()
    if not isinstance(length, int) or length < 1:
        return []
    return [
        f"data.seq_len={length}: {problem}"
        for problem in length_problems(layout, _options_of(cfg.strategy), length, "strategy.")
    ]


def _with_cut_module(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """What beside the strategy cannot work when ranks hold parts of the module."""
    layout = closed_layout(cfg, surroundings)
    if layout is None or not cuts_module(layout):
        return []
    problems = [
        f"callbacks.{name}: {averaging_problem(class_of(callback))}"
        for name, callback in cfg.callbacks.items()
        if isinstance(callback, DictConfig) and class_of(callback) in _AVERAGING and layout.expert > 1
    ]
    if cfg.trainer.sync_batchnorm:
        problem = sync_batchnorm_problem(layout)
        problems += [problem] if problem else []
    if isinstance(cfg.optimizer, DictConfig):
        problem = optimizer_problem(layout, class_of(cfg.optimizer))
        problems += [f"optimizer: {problem}"] if problem else []
    return problems


def _model(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """The layout against the module itself; imports torch, so only where the module is cut."""
    layout = closed_layout(cfg, surroundings)
    if layout is None or not _is_hybrid(cfg.strategy) or not cuts_module(layout) or "_target_" not in cfg.module:
        return []
    from trainwright.trainer.check_layout import problems_of_model

    return problems_of_model(cfg, layout, with_options=not _hybrid_options(cfg, surroundings))


def _ends(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    limited = cfg.max_steps is not None or cfg.max_epochs is not None or cfg.trainer.max_time is not None
    if surroundings.verb != "fit" or limited or cfg.trainer.fast_dev_run:
        return []
    return ["max_steps and max_epochs are both null, so the run would never end; type max_steps=1000 or max_epochs=10"]


def _run_dir(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    run_dir = Path(cfg.run_dir)
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not existing.is_dir():
        return [f"run_dir={run_dir}: {existing} is a file; type another run_dir=..."]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"run_dir={run_dir}: {existing} is not writable for this user; type another run_dir=..."]
    if surroundings.verb == "fit" and holds_run(run_dir) and not _continues(cfg, run_dir):
        return [
            f"run_dir={run_dir}: holds a run already; type ckpt_path=last or resume=auto to go on from it, or "
            "another run_dir=..."
        ]
    return []


def _continues(cfg: DictConfig, run_dir: Path) -> bool:
    """Whether the run goes on in its own directory; with resume=auto it may have ended before its first checkpoint."""
    if cfg.resume == AUTO:
        return True
    return cfg.ckpt_path is not None and Path(cfg.ckpt_path).absolute().is_relative_to(run_dir.absolute())


def _resume(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return resume_problems(cfg, surroundings.verb)


def _inject(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    world_size = world_size_of(cfg, surroundings) if _has_world_size(cfg) else None
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
    return recovery_problems(cfg, surroundings.verb, layout, has_launcher, _tells_layout(cfg.strategy))


def _local_updates(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return local_update_refusals(cfg, surroundings.verb, closed_layout(cfg, surroundings))


def _hangs(cfg: DictConfig, _: Surroundings) -> list[str]:
    return hang_problems(cfg)


def _guard(cfg: DictConfig, _: Surroundings) -> list[str]:
    return guard_refusals(cfg)


def _parameter_server(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return parameter_server_problems(cfg, world_size_of(cfg, surroundings) if _has_world_size(cfg) else None)


def _placement(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return placement_refusals(cfg, surroundings.verb)


def _data_options(cfg: DictConfig, _: Surroundings) -> list[str]:
    trainer = cfg.trainer
    if trainer.data_key is not None and trainer.data_partition != "hash":
        return [
            f"trainer.data_key={trainer.data_key} with trainer.data_partition={trainer.data_partition}: only hash asks "
            "for keys; type trainer.data_partition=hash, or leave trainer.data_key out"
        ]
    return []


def _loss_scale(cfg: DictConfig, _: Surroundings) -> list[str]:
    given: Any = OmegaConf.to_container(cfg.trainer.loss_scale)
    return loss_scale_problems(given, cfg.precision)


def _module_given(cfg: DictConfig, _: Surroundings) -> list[str]:
    if "_target_" in cfg.module:
        return []
    return ["module: names no class; the recipe sets it: module: {_target_: package.module.YourLightningModule}"]


def _callbacks_named(cfg: DictConfig, _: Surroundings) -> list[str]:
    return [
        f"{group}.{name}: names no class; write _target_: package.module.Class, or {group}.{name}=null to leave it out"
        for group in ("callbacks", "checkpoint", "monitor", "guard", "logger")
        for name, value in cfg[group].items()
        if value is not None and not (isinstance(value, DictConfig) and "_target_" in value)
    ]


def _targets(plain: Any) -> Iterator[str]:
    for key, target in targets_in(plain):
        problem = problem_of_target(key, target)
        if problem is not None:
            yield problem


def _own_checks(cfg: DictConfig, surroundings: Surroundings, in_order: bool) -> list[str]:
    """Run the checks of recipe and strategy, even when something else is wrong, so that all is said at once."""
    try:
        ranks = num_data_ranks(cfg, world_size_of(cfg, surroundings)) if _has_world_size(cfg) else 1
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


def _device_profile(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    return profile_problems(cfg)


_CHECKS: tuple[Callable[[DictConfig, Surroundings], list[str]], ...] = (
    _module_given,
    _callbacks_named,
    _whole_numbers,
    _known_words,
    _devices_there,
    _device_profile,
    _launcher,
    _layout,
    _batch,
    _strategy_options,
    _hybrid_options,
    _pipeline_batch,
    _balance,
    _compression,
    _communication,
    _local_updates,
    _sequence,
    _with_cut_module,
    _ends,
    _run_dir,
    _resume,
    _restarts,
    _recovery,
    _hangs,
    _preemption,
    _guard,
    _parameter_server,
    _placement,
    _data_options,
    _loss_scale,
    _inject,
)
