"""Process groups that do not keep a rank waiting for one that has failed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

# Ranks above which those of a group connect when they first send each other something. Each rank connecting to each
# takes as many open files as there are ranks, in every group; collectives send to few.
_MOST_CONNECTIONS = 128
# Read by torch when it makes a group.
_CONNECT_LATE = "TORCH_GLOO_LAZY_INIT"


def default_store() -> dist.Store:
    """The store of the process group of all ranks."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def all_come(key: str, patience: timedelta) -> bool:
    """Wait in the store of all ranks until each has come; whether they did in time.

    Args:
        key: of this meeting, the same on all ranks.
        patience: how long this rank waits.
    """
    store = default_store()
    if store.add(key, 1) == dist.get_world_size():
        store.set(f"{key}/all", "1")
    try:
        store.wait([f"{key}/all"], patience)
    except dist.DistError:  # the time is over, or whoever holds the store is gone
        return False
    return True


def gloo_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A new gloo group of all ranks; a collective.

    Making a group waits in the store of the ranks, for the full timeout where another rank has failed in a hook before.
    A barrier waits in connections, which break when that rank goes, so it comes first.

    Args:
        timeout: of the collectives of the group; ``None`` is torch's.

    Raises:
        RuntimeError: if another rank has gone; with NCCL that is noticed by its own watchdog alone.
    """
    if dist.get_backend() == dist.Backend.GLOO:
        dist.barrier()
    with _connections(dist.get_world_size()):
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


@contextmanager
def _connections(ranks: int) -> Iterator[None]:
    """Within it, gloo connects ranks late if they are many; unless the environment says something else."""
    if ranks <= _MOST_CONNECTIONS or _CONNECT_LATE in os.environ:
        yield
        return
    os.environ[_CONNECT_LATE] = "1"
    try:
        yield
    finally:
        del os.environ[_CONNECT_LATE]


class WorldGroup:
    """A group of all ranks: made when it is first asked for, and again when the ranks have met anew since.

    Args:
        make: makes one; a collective.
    """

    def __init__(self, make: Callable[[], dist.ProcessGroup] = gloo_group) -> None:
        self._make = make
        self._group: dist.ProcessGroup | None = None
        self._world: dist.ProcessGroup | None = None

    def get(self) -> dist.ProcessGroup:
        """The group; the first call after the ranks have met is a collective."""
        if self._group is None or self._world is not dist.group.WORLD:
            self._group, self._world = self._make(), dist.group.WORLD
        return self._group

    def forget(self) -> None:
        """Let go of it."""
        self._group = self._world = None
