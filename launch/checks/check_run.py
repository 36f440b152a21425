"""Checks of plain keys, loggers, local devices, launchers, the run directory and gradient compression."""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.checkpoint.read.candidates import AUTO
from trainwright.core.processes import machine
from trainwright.core.run.run_directory import holds_run
from trainwright.launch.engines import engines
from trainwright.strategies.averaging.compression.options import OFF, message_options, nothing_to_compress
from trainwright.strategies.compose.world import Surroundings, options_of
from trainwright.strategies.contract.options import StrategyOptions

# Packages that logger classes need; each is an extra of this package too.
_PACKAGES = {"Wandb": "wandb", "WandbLogger": "wandb", "MLFlow": "mlflow", "MLFlowLogger": "mlflow"}
_WANDB_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")


def device_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """Return problems of the accelerator: too few GPUs, or one that the strategy or the launcher cannot use."""
    if cfg.accelerator == "mps":
        return list(_mps_problems(cfg))
    if surroundings.world_size is not None or cfg.accelerator not in ("auto", "gpu") or engines.uses_engine(cfg):
        return []
    gpus = machine.num_gpus()
    if gpus == 0:
        if cfg.accelerator == "auto":
            return []
        return ["accelerator=gpu: torch finds no GPU on this machine; type accelerator=cpu"]
    if cfg.devices == "auto" or not isinstance(cfg.devices, int) or cfg.devices <= gpus:
        return []
    counted = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return [f"devices={cfg.devices} on a machine with {counted}; type devices={gpus}, or accelerator=cpu"]


def _mps_problems(cfg: DictConfig) -> Iterator[str]:
    options = options_of(cfg.strategy)
    if options is not None and not options.takes_mps:
        yield "accelerator=mps: an Apple GPU has no collectives; type strategy=single devices=1, or accelerator=cpu"
    elif engines.uses_engine(cfg):
        yield f"accelerator=mps with launch={cfg.launch.kind}: works only on this machine; type launch=local"
    elif not machine.has_mps():
        yield "accelerator=mps: torch finds no Apple GPU on this machine; type accelerator=cpu"


def launch_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """Return problems of the launcher: it is missing, or has started another number of ranks."""
    started = surroundings.world_size
    if started is None:
        return engines.engine_problems(cfg) if engines.uses_engine(cfg) else _local_launch_problems(cfg)
    if cfg.devices == "auto" or not isinstance(cfg.devices, int) or started == cfg.devices * cfg.nodes:
        return []
    given = f"devices={cfg.devices} nodes={cfg.nodes} make {cfg.devices * cfg.nodes} rank(s)"
    return [f"{given}, but the launcher has started {started}; type devices=auto to use the launcher's ranks"]


def _local_launch_problems(cfg: DictConfig) -> list[str]:
    problems = []
    if cfg.launch.kind == "torchrun":
        command = f"torchrun --nproc-per-node={cfg.devices} -m trainwright ... (or srun)"
        problems.append(f"launch=torchrun: no launcher has started this process; type {command}, or launch=local")
    elif cfg.nodes > 1:
        command = f"torchrun --nnodes={cfg.nodes} --nproc-per-node={cfg.devices} -m trainwright ... (or srun)"
        problems.append(f"nodes={cfg.nodes}: this command starts the ranks of one machine; type on each {command}")
    port = cfg.launch.port
    if port is not None and 1 <= port <= 65535 and machine.port_is_taken(port):
        problems.append(f"launch.port={port} is taken by another process on 127.0.0.1; leave launch.port out")
    return problems


def run_dir_problems(cfg: DictConfig, verb: str) -> list[str]:
    """Return why the run directory cannot be used: a file, a broken link, not writable, or holding another run."""
    run_dir = Path(cfg.run_dir)
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.lexists(path))
    if not existing.exists():
        problem = f"{existing} is a link to {os.readlink(existing)}, which does not exist; make that folder, or type"
    elif not existing.is_dir():
        problem = f"{existing} is a file; type"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing} is not writable for this user; type"
    elif verb == "fit" and holds_run(run_dir) and not _resumes(cfg, run_dir):
        problem = "holds a run already; type ckpt_path=last or resume=auto to resume it, or"
    else:
        return []
    return [f"run_dir={run_dir}: {problem} another run_dir=..."]


def _resumes(cfg: DictConfig, run_dir: Path) -> bool:
    """Return whether the run resumes in its own directory; with resume=auto it may have ended before a checkpoint."""
    if cfg.resume == AUTO:
        return True
    return cfg.ckpt_path is not None and Path(cfg.ckpt_path).resolve().is_relative_to(run_dir.resolve())


def module_problems(cfg: DictConfig) -> list[str]:
    """Return a problem if no module is configured."""
    if "_target_" in cfg.module:
        return []
    return ["module: names no class; the recipe sets it: module: {_target_: package.module.YourLightningModule}"]


def callback_problems(cfg: DictConfig) -> list[str]:
    """Return callbacks and loggers without a class."""
    return [
        f"{group}.{name}: names no class; write _target_: package.module.Class, or {group}.{name}=null to leave it out"
        for group in ("callbacks", "checkpoint", "monitor", "guard", "logger")
        for name, value in cfg[group].items()
        if value is not None and not (isinstance(value, DictConfig) and "_target_" in value)
    ]


def logger_problems(cfg: DictConfig) -> list[str]:
    """Return loggers whose package is not installed, and unknown modes of wandb."""
    problems = []
    for name, value in cfg.logger.items():
        target = str(value.get("_target_")).rpartition(".")[2] if isinstance(value, DictConfig) else ""
        package = _PACKAGES.get(target)
        if package is not None and importlib.util.find_spec(package) is None:
            install = f'pip install "trainwright[{package}]"'
            problems.append(f"logger.{name}: {package} is not installed; type {install}, or leave {name} out")
        mode = value.get("mode") if package == "wandb" else None
        if mode is not None and mode not in _WANDB_MODES:
            problems.append(f"logger.{name}.mode={mode}: allowed are {', '.join(_WANDB_MODES)}")
    return problems


def name_problems(cfg: DictConfig) -> list[str]:
    """Return a problem if the name of the run cannot be that of a directory."""
    if not str(cfg.name).strip() or any(sign in str(cfg.name) for sign in "/\\\0") or cfg.name in (".", ".."):
        return [f"name={cfg.name!r}: becomes the name of a directory; type letters, digits, - and _"]
    return []


def data_problems(cfg: DictConfig) -> list[str]:
    """Return data options that have no effect."""
    key, partition = cfg.trainer.data_key, cfg.trainer.data_partition
    if key is None or partition == "hash":
        return []
    given = f"trainer.data_key={key} with trainer.data_partition={partition}"
    return [f"{given}: only hash uses keys; type trainer.data_partition=hash, or leave trainer.data_key out"]


def end_problems(cfg: DictConfig, verb: str) -> list[str]:
    """Return a problem if training has no limit."""
    limited = cfg.max_steps is not None or cfg.max_epochs is not None or cfg.trainer.max_time is not None
    if verb != "fit" or limited or cfg.trainer.fast_dev_run:
        return []
    return ["max_steps and max_epochs are both null, so the run would never end; type max_steps=1000 or max_epochs=10"]


def compression_refusals(cfg: DictConfig, options: StrategyOptions | None) -> Iterator[str]:
    """Yield what the group `compression`, which sets that option of the strategy, cannot be combined with."""
    name, own = cfg.compression.name, cfg.strategy.get("compression")
    if name == OFF:
        return
    if options is None:
        given = f"compression={name} with {cfg.strategy.get('_target_') or 'a strategy without class'}"
        yield f"{given}: only strategies built on this project's compress; type strategy=ddp, or compression=none"
    elif own is not None:
        yield (
            f"compression={name} with strategy.compression={own}: both set the compression of the same messages; type "
            "compression=none, or strategy.compression=null"
        )
    elif options.averages_gradients and not hasattr(options, "compression"):
        yield nothing_to_compress(name)


def with_compression(cfg: DictConfig, options: StrategyOptions | None) -> StrategyOptions | None:
    """Return the options with what the group `compression` sets."""
    if cfg.compression.name == OFF or options is None or not hasattr(options, "compression"):
        return options
    return replace(options, compression=compression_of(cfg, options))  # type: ignore[call-arg]


def compression_of(cfg: DictConfig, options: StrategyOptions | None) -> dict[str, Any]:
    """Return the argument `compression` of a strategy, from the group of that name."""
    plain: Any = OmegaConf.to_container(cfg.compression)
    return dict(plain) if options is None or options.averages_gradients else message_options(plain)
