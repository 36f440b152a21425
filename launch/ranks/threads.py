"""CPU threads of a rank that shares its machine with others."""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig

from trainwright.core.processes.machine import num_cores


def threads_of_rank(cfg: DictConfig, environment: Mapping[str, str]) -> str:
    """What a rank has for OMP_NUM_THREADS: as somebody has asked, else its share of the cores of this machine.

    Args:
        cfg: the resolved configuration, with `devices` ranks on a machine.
        environment: what the user has set.
    """
    return str(cfg.launch.threads or environment.get("OMP_NUM_THREADS") or max(1, num_cores() // cfg.devices))
