"""Process groups and device meshes of a layout."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainwright.core.layout import Layout

# Above this number of groups, a device-bound communicator is split once for all of them.
_MOST_SPLITS = 64
# Seconds between two polls of a store.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


class LayoutGroups:
    """Process groups along the axes of a layout, created on demand.

    Creation is a collective of all ranks: all must request the same groups in the same order.

    Args:
        layout: a closed layout of the default process group's world size.
        device_type: of the meshes, ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, layout: Layout, device_type: str) -> None:
        self.layout = layout
        self._device_type = device_type
        self._made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
        self._along: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    def along(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ from this one only along ``axes``; ``None`` if there is just one."""
        if axes not in self._along:
            groups = self.layout.groups(*axes)
            self._along[axes] = self.of(groups) if len(groups[0]) > 1 else None
        return self._along[axes]

    def of(self, groups: list[list[int]]) -> dist.ProcessGroup | None:
        """Return the process group for the one of the disjoint ``groups`` with this rank in it; ``None`` if none."""
        key = tuple(map(tuple, groups))
        if key not in self._made:
            if groups == [list(range(dist.get_world_size()))]:
                self._made[key] = dist.group.WORLD
            else:
                self._made[key] = new_subgroup(groups)
        return self._made[key]

    def mesh(self, *axes: tuple[str, ...]) -> DeviceMesh:
        """Return a mesh around this rank; each of its axes joins a tuple of layout axes and is named after the first.

        Axes of size 1 are left out, except for the last.
        """
        kept = [names for names in axes[:-1] if len(self._neighbours(names)) > 1] + [axes[-1]]
        groups = [self.of(self.layout.groups(*names)) for names in kept]
        ranks = torch.tensor(self._neighbours([name for names in kept for name in names]))
        shape = [len(self._neighbours(names)) for names in kept]
        names = tuple(names[0] for names in kept)
        members = [group for group in groups if group is not None]
        return DeviceMesh.from_group(
            members if len(members) > 1 else members[0], self._device_type, mesh=ranks.view(shape), mesh_dim_names=names
        )

    def _neighbours(self, axes: Sequence[str]) -> list[int]:
        return self.layout.group_of(dist.get_rank(), *axes)


def new_subgroup(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Create the process group for the one of ``groups`` with this rank in it; ``None`` if none has. A collective.

    Equals ``new_subgroups_by_enumeration`` of torch, group names included, but each rank creates only its own group,
    which scales to 100,000 ranks. With a device-bound default group, creating one splits the communicator on all ranks,
    so many groups share one split.

    Args:
        groups: disjoint lists of global ranks, the same on all ranks.
    """
    own = next((number for number, ranks in enumerate(groups) if dist.get_rank() in ranks), None)
    is_bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    if is_bound and len(groups) > _MOST_SPLITS:
        split: dist.ProcessGroup | None = dist.split_group(split_ranks=[list(ranks) for ranks in groups])
        return None if own is None else split
    if is_bound or os.environ.get("TORCH_DIST_INIT_BARRIER") == "1":  # torch then needs all ranks for each group
        group: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])[0]
        return group
    # Torch derives the name of a group from this count, and ranks rendezvous by name.
    book = dist.distributed_c10d._world
    first = book.group_count
    made = None
    if own is not None:
        book.group_count = first + own
        made = dist.new_group(list(groups[own]))
    book.group_count = first + len(groups)
    return made


def device_of(group: dist.ProcessGroup) -> torch.device | None:
    """Return the device that the group's tensors must be on: the current GPU for NCCL; ``None``: any."""
    if dist.get_backend(group) != "nccl":
        return None
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def sum_over(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over a group, on the device of the group. A collective.

    Args:
        group: of the ranks.
        tensor: on any device, such as an offloaded gradient; may be modified.
    """
    device = device_of(group)
    total = tensor if device is None else tensor.to(device)
    dist.all_reduce(total, group=group)
    return total


def wait_for_key(store: dist.Store, key: str, pause: Callable[[float], object] = time.sleep) -> str | None:
    """Poll a store for a key, without a timeout, and return its value.

    Unlike ``store.wait``, this can be interrupted and logs no timeouts to stderr.

    Args:
        store: of ``torch.distributed``.
        key: that another rank will set.
        pause: called with the seconds to sleep between polls; a true result ends waiting.

    Returns:
        The value; ``None`` if ``pause`` ended waiting.

    Raises:
        RuntimeError: if the store is unavailable.
    """
    seconds = _FIRST_PAUSE
    while not store.check([key]):
        if pause(seconds):
            return None
        seconds = min(seconds * 1.5, _LONGEST_PAUSE)
    value: str = store.get(key).decode(errors="replace")
    return value


def destroy_groups() -> None:
    """Destroy all process groups, so that this process can join new ones.

    Peers need not participate: NCCL groups, whose collectives would hang without them, are aborted.
    """
    gc.collect()  # DistributedDataParallel keeps a reference to the group; gloo threads would abort the process
    if not abort_groups() and dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    clear_mesh_caches()


def abort_groups() -> bool:
    """Abort all process groups if they are NCCL's, whose kernels wait for lost peers. May be called from any thread.

    Returns:
        Whether groups were aborted; those of other backends stay.
    """
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return False
    from trainwright.core.torch_internals import _abort_process_group

    _abort_process_group()
    return True


def clear_mesh_caches() -> None:
    """Clear DTensor's caches of operations on earlier meshes.

    The caches compare meshes by ranks and axes, not by process groups, so a new mesh would use destroyed groups. That
    hangs or writes out of bounds.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from trainwright.core.torch_internals import _clear_sharding_prop_cache, _redistribute

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
