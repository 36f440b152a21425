"""Rendezvous of a run's processes."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from trainwright.core.processes.rendezvous import first_store, is_loopback, loopback_interfaces


@contextmanager
def rendezvous(environment: ClusterEnvironment | None, nodes: int) -> Iterator[None]:
    """Provide the store while Lightning creates the process group.

    Args:
        environment: of the cluster; ``None``: one process.
        nodes: number of machines.

    Raises:
        RuntimeError: if another program uses the port.
    """
    store = None if dist.is_initialized() else first_store(environment, nodes)
    if nodes == 1 and environment is not None and is_loopback(environment.main_address):
        os.environ.update(loopback_interfaces())
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ.get("MASTER_PORT", "of this run")
        raise RuntimeError(
            f"The ranks cannot meet at port {port}: another program uses it. Free it, or choose another one with "
            "launch.port=<number> (in a plain script: the environment variable MASTER_PORT)."
        ) from error
    del store  # torch holds its own reference now
    atexit.register(_destroy_group)


def _destroy_group() -> None:
    """Destroy a gloo group before the interpreter exits, which its threads would abort."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        gc.collect()  # DistributedDataParallel keeps a reference to the group
        dist.destroy_process_group()
