"""The cluster of Ray that a run is on: one that is there, or one of this machine for this run alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.core.problems import ConfigError
from trainwright.core.processes.machine import num_cores
from trainwright.core.processes.variables import default_variables
from trainwright.core.run.interrupt import HeldSignals
from trainwright.launch.engines.ray.places import total

_LOCAL = "local"
# Ray's own: no statistics of use are sent, and a cluster of this machine listens to this machine alone.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@contextlib.contextmanager
def cluster(cfg: DictConfig, signals: HeldSignals) -> Iterator[None]:
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
            with signals.held():
                _connect(address, options)
            yield
        finally:
            with signals.held():
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
