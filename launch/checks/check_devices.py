"""Devices of this machine, and whoever starts ranks on them."""

from omegaconf import DictConfig

from trainwright.core.processes import machine
from trainwright.launch.engines import engines
from trainwright.strategies.compose.world import Surroundings


def device_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """More GPUs than this machine has."""
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


def launch_problems(cfg: DictConfig, surroundings: Surroundings) -> list[str]:
    """A launcher that is not there, or has started another number of ranks."""
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
    elif port is not None and machine.port_is_taken(port):
        problems.append(
            f"launch.port={port} is taken by another process on 127.0.0.1; leave launch.port out to have a free one "
            "picked"
        )
    return problems
