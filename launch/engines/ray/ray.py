"""`launch=ray`: a placement group of Ray, with an actor for each rank.

This command is Ray's driver: it decides about failures as with `launch=local` (`trainwright.launch.local.attempts`),
while Ray decides where ranks are. Ray starts no actor again by itself: one rank alone could not go on.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.problems import ConfigError
from trainwright.core.processes.machine import num_cores
from trainwright.core.processes.scratch import default_variables
from trainwright.core.run.interrupt import DeferredSignals
from trainwright.launch.engines.ray.attempt import RayAttempts
from trainwright.launch.engines.ray.places import total
from trainwright.launch.engines.ray.room import Room
from trainwright.launch.local.attempts import AttemptedRun
from trainwright.launch.outcome.ending import notices
from trainwright.launch.recovery.check_recovery import RESTART
from trainwright.launch.recovery.restart_log import RestartLog


def problems(cfg: DictConfig, verb: str) -> list[str]:
    """What is impossible about `launch`, with what to type instead.

    Args:
        cfg: resolved, with `run_dir` decided.
        verb: fit, validate, test or predict.
    """
    return [*_of_recovery(cfg), *_of_resources(cfg), *_of_ranks(cfg)]


def _of_recovery(cfg: DictConfig) -> Iterator[str]:
    launch = cfg.launch
    if launch.recovery != RESTART:
        yield (
            f"launch.recovery={launch.recovery} with launch=ray: a failure starts all ranks again; type "
            "launch.recovery=restart"
        )
    if launch.min_devices is not None and cfg.nodes > 1:
        yield (
            f"launch.min_devices={launch.min_devices} with launch=ray on nodes={cfg.nodes}: only a group of ranks on "
            "one machine shrinks; type nodes=1, or leave it out"
        )
    if cfg.preemption.requeue:
        yield "preemption.requeue=true with launch=ray: Ray has no queue; type preemption.requeue=false"


def _of_resources(cfg: DictConfig) -> Iterator[str]:
    launch = cfg.launch
    if cfg.accelerator == "gpu" and launch.gpus_per_rank not in (None, 1):
        yield (
            f"launch.gpus_per_rank={launch.gpus_per_rank:g} with accelerator=gpu: a rank trains on one GPU; type "
            "launch.gpus_per_rank=1, or leave it out"
        )


def _of_ranks(cfg: DictConfig) -> Iterator[str]:
    if cfg.devices == "auto":
        return  # refused for every engine
    world = cfg.devices * cfg.nodes
    ranks: dict[int, Any] = dict(cfg.launch.ranks)
    for rank, needs in ranks.items():
        if not 0 <= rank < world:
            yield f"launch.ranks.{rank}: there are ranks 0 to {world - 1}; leave it out"
        if not isinstance(needs, DictConfig):
            yield f"launch.ranks.{rank}={needs!s}: must be names and amounts, like launch.ranks={{{rank}: {{cpus: 8}}}}"
            continue
        plain: Any = OmegaConf.to_container(needs)
        for name, amount in plain.items():
            if not isinstance(amount, int | float) or isinstance(amount, bool) or amount < 0:
                yield f"launch.ranks.{rank}.{name}={amount}: must be a number of at least 0"


# ---- the run ---------------------------------------------------------------------------------------------------------


def launch(cfg: DictConfig, verb: str) -> dict[str, float]:
    """Run the ranks as actors, and start them again where `launch` asks for it.

    Args:
        cfg: the resolved configuration, already written to its run directory.
        verb: fit, validate, test or predict.

    Returns:
        The metrics that rank 0 ended with, by name.

    Raises:
        RankError: if a rank failed; all others have ended.
        Interrupted: if this process was told to end; all ranks have ended.
        ConfigError: if the cluster cannot be reached, or has no room.
    """
    with DeferredSignals(notices(cfg)) as signals, cluster(cfg, signals):
        log = RestartLog(Path(cfg.run_dir))
        room = Room(cfg, verb, log, signals)
        sizes = None if cfg.launch.min_devices is None else room
        return AttemptedRun(cfg, verb, RayAttempts(verb, room, signals), log, sizes).run()


_LOCAL = "local"
# Ray's own: no statistics of use are sent, and a cluster of this machine listens to this machine alone.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@contextlib.contextmanager
def cluster(cfg: DictConfig, signals: DeferredSignals) -> Iterator[None]:
    """Be connected to the cluster of a run; one of this machine is started before and ended after it.

    Args:
        cfg: the resolved configuration.
        signals: held while Ray starts and ends.

    Raises:
        ConfigError: if the cluster cannot be reached.
    """
    address = cfg.launch.address
    with default_variables({**_QUIET, **(_LOOPBACK if address == _LOCAL else {})}):
        import ray

        if ray.is_initialized():  # by a program that uses trainwright
            yield
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
        runtime_env: Any = OmegaConf.to_container(cfg.launch.runtime_env)
        if runtime_env:
            options["runtime_env"] = runtime_env
        if address == _LOCAL:
            options |= _own_cluster(cfg)
        try:
            with signals.deferred():
                _connect(address, options)
            yield
        finally:
            with signals.deferred():
                ray.shutdown()


def _connect(address: str, options: Mapping[str, Any]) -> None:
    import ray

    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError([f"launch.address={address}: {str(error).splitlines()[0]}"]) from error


def _own_cluster(cfg: DictConfig) -> dict[str, Any]:
    """A cluster of this machine that has room for all ranks: they share its cores as they would with launch=local."""
    needs = total(cfg)
    cpus = max(num_cores(), math.ceil(needs.pop("CPU", 0.0)))
    others = {name: amount for name, amount in needs.items() if name not in ("GPU", "memory")}
    return {"include_dashboard": False, "num_cpus": cpus, **({"resources": others} if others else {})}
