"""Process groups that do not keep a rank waiting for one that has failed."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


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
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group
