"""How the processes of a run meet, and leave each other."""

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
def meeting(environment: ClusterEnvironment | None, nodes: int) -> Iterator[None]:
    """Within it Lightning makes the process group.

    Args:
        environment: of the cluster; ``None``: there is one process.
        nodes: number of machines.

    Raises:
        RuntimeError: if another program uses the port at which the ranks are to meet.
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
    del store  # torch has shared it by now
    atexit.register(_leave_group)


def _leave_group() -> None:
    """Leave the process group before the interpreter ends: gloo's threads abort a process that they outlive."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        gc.collect()  # DistributedDataParallel holds on to the group
        dist.destroy_process_group()
