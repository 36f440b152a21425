"""Ranks that torchrun or SLURM has started: rank 0 decides for all, through the launcher's store."""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.trainer.launch.launcher import Launcher

_KEY = "trainwright/run"
_TIMEOUT = timedelta(minutes=5)


def agree(launcher: Launcher, decide: Callable[[], DictConfig]) -> DictConfig | None:
    """Let rank 0 decide on the configuration, and hand it to every rank.

    The resolved configuration travels as text (JSON around yaml), so that machines need not share a file system and
    nothing that is received can run.

    Args:
        launcher: as `detect_launcher` found it.
        decide: composes and checks the configuration and makes the run directory; called on rank 0 alone.

    Returns:
        The configuration; None on the ranks that learn that rank 0 has refused it.

    Raises:
        Exception: on rank 0, whatever `decide` raised.
    """
    store = _connect(launcher)
    if launcher.rank != 0:
        answer = json.loads(store.get(_KEY).decode())
        store.add(f"{_KEY}/read", 1)
        return None if answer["config"] is None else _config(answer["config"])
    answer = {"config": None}
    try:
        cfg = decide()
        answer["config"] = OmegaConf.to_yaml(cfg, resolve=True)
        return cfg
    finally:
        store.set(_KEY, json.dumps(answer))
        if answer["config"] is None:
            _wait_for_readers(store, launcher.world_size - 1)  # the store may live in this process, which ends now


def _config(text: str) -> DictConfig:
    cfg = OmegaConf.create(text)
    assert isinstance(cfg, DictConfig)
    return cfg


def _connect(launcher: Launcher) -> Any:
    """A client of the store that the ranks also make their process group with."""
    from torch.distributed import rendezvous

    address, port = _address(launcher)
    url = f"tcp://{address}:{port}?rank={launcher.rank}&world_size={launcher.world_size}"
    store, _, _ = next(iter(rendezvous(url, timeout=_TIMEOUT)))
    return store


def _address(launcher: Launcher) -> tuple[str, str]:
    if launcher.name == "SLURM" and "MASTER_ADDR" not in os.environ:
        from lightning.pytorch.plugins.environments import SLURMEnvironment

        environment = SLURMEnvironment(auto_requeue=False)
        return environment.main_address, str(environment.main_port)
    return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]


def _wait_for_readers(store: Any, readers: int, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while store.add(f"{_KEY}/read", 0) < readers and time.monotonic() < end:
        time.sleep(0.05)
