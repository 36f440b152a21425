"""Process groups whose creation does not block on a failed rank."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from trainwright.core.processes.scratch import default_variables

# World size above which ranks connect lazily. A full mesh takes one open file per rank in every group, while
# collectives use few connections.
_MOST_CONNECTIONS = 128
# Read by torch when it creates a group.
_CONNECT_LATE = "TORCH_GLOO_LAZY_INIT"


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def wait_for_all(key: str, patience: timedelta) -> bool:
    """Wait in the default store until all ranks have arrived; return whether they did in time.

    Args:
        key: of this meeting, the same on all ranks.
        patience: timeout of this rank.
    """
    store = default_store()
    if store.add(key, 1) == dist.get_world_size():
        store.set(f"{key}/all", "1")
    try:
        store.wait([f"{key}/all"], patience)
    except dist.DistError:  # timeout, or the store's host is gone
        return False
    return True


def gloo_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Create a gloo group of all ranks; a collective.

    Creating a group waits in the store for the full timeout if another rank has failed. A barrier fails at once when
    that rank's connection breaks, so it comes first.

    Args:
        timeout: of the group's collectives; ``None``: torch's default.

    Raises:
        RuntimeError: if another rank has ended; with NCCL only its watchdog notices.
    """
    if dist.get_backend() == dist.Backend.GLOO:
        dist.barrier()
    many = dist.get_world_size() > _MOST_CONNECTIONS
    with default_variables({_CONNECT_LATE: "1"} if many else {}):
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


class WorldGroup:
    """A gloo group of all ranks, created on first use, and again after the default process group was recreated."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._world: dist.ProcessGroup | None = None

    def get(self) -> dist.ProcessGroup:
        """Return the group; the first call per default process group is a collective."""
        if self._group is None or self._world is not dist.group.WORLD:
            self._group, self._world = gloo_group(), dist.group.WORLD
        return self._group

    def forget(self) -> None:
        """Drop the group."""
        self._group = self._world = None
