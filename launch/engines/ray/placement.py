"""Resources of a run's ranks in a Ray cluster, and their placement: as many as there is room for."""

import contextlib
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from trainwright.core.config.references import variables_of
from trainwright.core.failures.failure import RankError
from trainwright.core.problems import ConfigError
from trainwright.core.run.interrupt import DeferredSignals
from trainwright.core.text.messages import token_environment
from trainwright.launch.recovery.restarts import AttemptFailure, RestartLog
from trainwright.launch.recovery.sizes import feasible, resized

# Longest uninterrupted wait for Ray, in seconds; signals are handled in between.
_POLL_SECONDS = 1.0
# Seconds to place a smaller group, once the whole one could not be placed in time.
_SMALLER_SECONDS = 5.0


class RankPlaces:
    """The placement group of a run: as many ranks as there is room for, at least `launch.min_devices`.

    Args:
        cfg: the resolved configuration of the first attempt.
        verb: fit, validate, test or predict.
        log: receives every change.
        signals: held during calls of Ray.
    """

    def __init__(self, cfg: DictConfig, verb: str, log: RestartLog, signals: DeferredSignals) -> None:
        self._cfg = cfg
        self._verb = verb
        self._log = log
        self._signals = signals
        self._group: Any = None
        self._is_new = False
        self._size = int(cfg.devices)
        self._samples: int | None = None
        self._look_at = 0.0
        self._pause = float(cfg.launch.probe_seconds)

    @property
    def size(self) -> int:
        """Devices of the next attempt; reading it replaces the placement group."""
        self._take()
        return self._size

    def place(self) -> tuple[Any, int]:
        """Return Ray's placement group for the next attempt, and its number of devices."""
        if not self._is_new:
            self._take()
        self._is_new = False
        return self._group, self._size

    def close(self) -> None:
        """Remove the placement group."""
        import ray

        if self._group is not None:
            with self._signals.deferred(), contextlib.suppress(Exception):  # the cluster may be gone
                ray.util.remove_placement_group(self._group)
            self._group = None

    def blame(self, setback: AttemptFailure, samples: int | None) -> bool:
        """Account for a failure; lost resources are missing in the next placement."""
        self._samples = samples
        return False

    def look(self, samples: int | None) -> bool:
        """Return whether to try again with all devices: some machine has enough of everything, in use or not."""
        self._samples = samples
        if self._size == self._cfg.devices or time.monotonic() < self._look_at:
            return False
        self._back_off()
        grows = self._is_large_enough()
        if grows:
            self._log.write(f"the cluster has room for {self._cfg.devices} devices again")
        return grows

    def _take(self) -> None:
        """Replace the placement group by one of all devices, or after a wait by the largest possible one.

        Raises:
            ConfigError: if there is no room, and never was.
            RankError: if there is no room any more.
        """
        had_room = self._group is not None
        self.close()
        self._size = int(self._cfg.devices)
        if self._try_place(self._size, float(self._cfg.launch.placement_seconds)):
            return
        fewest = self._cfg.launch.min_devices
        sizes = [] if fewest is None else range(self._size - 1, fewest - 1, -1)
        for size in sizes:
            possible = feasible(self._cfg, self._verb, [size], self._samples) is not None
            if possible and self._try_place(size, _SMALLER_SECONDS):
                self._log.write(f"the cluster has room for {size} of {self._cfg.devices} devices")
                self._size = size
                self._back_off()
                return
        raise RankError(self._no_room_message(), 0, None) if had_room else ConfigError([self._no_room_message()])

    def _try_place(self, devices: int, seconds: float) -> bool:
        import ray

        cfg = resized(self._cfg, devices, self._samples, self._cfg.nodes)
        end = time.monotonic() + seconds
        with self._signals.deferred():
            group = ray.util.placement_group(bundles(cfg), strategy=cfg.launch.placement)
            self._group = group  # so that it is removed if the wait is interrupted
        while True:
            with self._signals.deferred():
                if group.wait(min(_POLL_SECONDS, seconds)):
                    self._is_new = True
                    return True
            if time.monotonic() >= end:
                self.close()
                return False

    def _back_off(self) -> None:
        self._look_at = time.monotonic() + self._pause
        self._pause *= 2

    def _is_large_enough(self) -> bool:
        import ray

        [bundle] = bundles(self._cfg)
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return any(all(has.get(name, 0.0) >= amount for name, amount in bundle.items()) for has in machines)

    def _no_room_message(self) -> str:
        import ray

        asked = " and ".join(_resources_text(bundle) for bundle in bundles(self._cfg))
        there = "; ".join(_resources_text(node["Resources"]) for node in ray.nodes() if node["Alive"])
        return (
            f"launch=ray: within launch.placement_seconds={self._cfg.launch.placement_seconds:g} there was no room for "
            f"{asked} (machine by machine, placement {self._cfg.launch.placement}); the machines of the cluster have "
            f"{there}; type fewer devices, or less of launch.cpus_per_rank and the like"
        )


def _resources_text(resources: Mapping[str, float]) -> str:
    shown = {name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store"))}
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in sorted(shown.items())) + "}"


# Keys of a rank in `launch.ranks`; any other name is a custom resource.
_OWN = ("cpus", "gpus", "memory_gb")
_GIB = 1 << 30


@dataclass(frozen=True)
class Place:
    """Location of a rank's actor.

    Attributes:
        address: of the machine, for the others.
        gpus: GPUs assigned to the actor.
    """

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
    given |= {**launch.resources, **launch.ranks.get(rank, {})}
    named = {"CPU": given["cpus"], "GPU": given["gpus"], "memory": math.ceil(given["memory_gb"] * _GIB)}
    others = {name: amount for name, amount in given.items() if name not in _OWN}
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
    from trainwright.launch.ranks.rendezvous import of_rank  # imports torch

    node = rank // cfg.devices
    cores = max(1, int(resources_of(cfg, rank).get("CPU", 1.0)))
    found = {
        **of_rank(rank, len(places), store, attempt, cfg.devices),
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
