"""Resources of ranks in a Ray cluster, and their environment: pure functions of the configuration."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.config.references import variables_of
from trainwright.core.text.messages import token_environment

# Keys of a rank in `launch.ranks`; any other name is a custom resource.
_OWN = ("cpus", "gpus", "memory_gb")
_GIB = 1 << 30


@dataclass(frozen=True)
class Place:
    """Location of a rank's actor.

    Attributes:
        node: Ray's name of the machine.
        address: of the machine, for the others.
        gpus: GPUs assigned to the actor.
    """

    node: str
    address: str
    gpus: tuple[str, ...] = ()


def resources_of(cfg: DictConfig, rank: int) -> dict[str, float]:
    """Return the resources that Ray reserves for a rank, by Ray's names, without zeros.

    Args:
        cfg: the resolved configuration.
        rank: global rank.
    """
    launch = cfg.launch
    gpus = launch.gpus_per_rank if launch.gpus_per_rank is not None else float(cfg.accelerator == "gpu")
    given: dict[str, Any] = {"cpus": launch.cpus_per_rank, "gpus": gpus, "memory_gb": launch.memory_gb_per_rank or 0.0}
    given |= _plain(launch.resources) | _plain(launch.ranks.get(rank, {}))
    named = {"CPU": given["cpus"], "GPU": given["gpus"], "memory": math.ceil(given["memory_gb"] * _GIB)}
    others = {str(name): amount for name, amount in given.items() if name not in _OWN}
    return {name: float(amount) for name, amount in {**named, **others}.items() if amount}


def bundles(cfg: DictConfig) -> list[dict[str, float]]:
    """Return the bundles of the placement group: one for the ranks of each machine, since a bundle stays on one
    machine.

    Args:
        cfg: the resolved configuration.
    """
    size = cfg.devices
    return [
        _total(resources_of(cfg, rank) for rank in range(node * size, (node + 1) * size)) for node in range(cfg.nodes)
    ]


def total(cfg: DictConfig) -> dict[str, float]:
    """Return the resources of all ranks together."""
    return _total(bundles(cfg))


def _total(amounts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in amounts:
        for name, amount in each.items():
            found[name] = found.get(name, 0.0) + amount
    return found


def actor_options(cfg: DictConfig, rank: int) -> dict[str, Any]:
    """Return Ray's options of a rank's actor, besides its placement; Ray never restarts it.

    Args:
        cfg: the resolved configuration.
        rank: global rank.
    """
    needs = resources_of(cfg, rank)
    options: dict[str, Any] = {
        "num_cpus": needs.pop("CPU", 0.0),
        "num_gpus": needs.pop("GPU", 0.0),
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    memory = needs.pop("memory", 0.0)
    if memory:
        options["memory"] = int(memory)
    return {**options, "resources": needs} if needs else options


def rank_variables(
    cfg: DictConfig, rank: int, places: Sequence[Place], store: tuple[str, int], attempt: int, threads: str | None
) -> dict[str, str]:
    """Return the variables of a rank: its numbers and the rendezvous.

    Args:
        cfg: the resolved configuration.
        rank: global rank.
        places: of all ranks, in order.
        store: address and port.
        attempt: number of restarts.
        threads: CPU threads per rank requested by the environment; None = as many as it has cores.
    """
    from trainwright.launch.ranks.environment import of_rank  # imports torch

    node = rank // cfg.devices
    cores = max(1, int(resources_of(cfg, rank).get("CPU", 1.0)))
    found = {
        **of_rank(rank, len(places), store, attempt, cfg.devices),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": str(cfg.name),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **token_environment(),
        "OMP_NUM_THREADS": str(cfg.launch.threads or threads or cores),
    }
    # Variables that the configuration refers to, because a rank may be on another machine.
    found |= {name: os.environ[name] for name in variables_of(cfg) if name in os.environ and name not in found}
    if places[0].address.startswith("127.") and all(place.address == places[0].address for place in places):
        # A cluster of this machine only: nothing listens on the network.
        found |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    visible = [gpu for place in places[node * cfg.devices : (node + 1) * cfg.devices] for gpu in place.gpus]
    if visible:
        # Ray shows each actor only its own GPUs; ranks of a machine must see each other's, and index their own.
        found["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    return found


def _plain(values: Any) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(values) if isinstance(values, DictConfig) else values
    return {str(name): value for name, value in plain.items()}
