"""The process groups of a layout, as one rank sees them."""

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

# Groups along an axis above which a bound device splits them off at once; fewer are split off one by one.
_MOST_SPLITS = 64
# Seconds between two looks for a key that somebody else will set.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


class LayoutGroups:
    """Process groups along the axes of a layout, made on demand.

    Making one is a collective of all ranks, so all must ask for the same ones in the same order.

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
        """The ranks that differ from this one along ``axes`` only; ``None`` if there are no others."""
        if axes not in self._along:
            groups = self.layout.groups(*axes)
            self._along[axes] = self.of(groups) if len(groups[0]) > 1 else None
        return self._along[axes]

    def of(self, groups: list[list[int]]) -> dist.ProcessGroup | None:
        """That of the given disjoint lists of ranks which holds this rank; ``None`` if none does."""
        key = tuple(map(tuple, groups))
        if key not in self._made:
            if groups == [list(range(dist.get_world_size()))]:
                self._made[key] = dist.group.WORLD
            else:
                self._made[key] = new_subgroup(groups)
        return self._made[key]

    def mesh(self, *axes: tuple[str, ...]) -> DeviceMesh:
        """A mesh of this rank's neighbours; each of its axes is a tuple of axes of the layout, named by the first.

        Only the last axis may have size 1; others of size 1 are left out.
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
    """The process group of that list of ranks which holds this rank; ``None`` if none does. A collective of all ranks.

    What ``new_subgroups_by_enumeration`` of torch gives, under the same names, but a rank makes its own group alone: of
    100,000 ranks each would look at all ranks of all groups. Where the default group is bound to a device, making a
    group is a split of the communicator that every rank takes part in; many are split off by one such split.

    Args:
        groups: disjoint lists of global ranks, the same on all ranks.
    """
    own = next((number for number, ranks in enumerate(groups) if dist.get_rank() in ranks), None)
    is_bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    if is_bound and len(groups) > _MOST_SPLITS:
        split: dist.ProcessGroup | None = dist.split_group(split_ranks=[list(ranks) for ranks in groups])
        return None if own is None else split
    if is_bound or os.environ.get("TORCH_DIST_INIT_BARRIER") == "1":  # then torch waits for all ranks at each group
        group: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])[0]
        return group
    # Torch names groups by counting them, and ranks find each other by the name.
    book = dist.distributed_c10d._world
    first = book.group_count
    made = None
    if own is not None:
        book.group_count = first + own
        made = dist.new_group(list(groups[own]))
    book.group_count = first + len(groups)
    return made


def device_of(group: dist.ProcessGroup) -> torch.device | None:
    """The one device that a group sends from: this rank's CUDA device, with NCCL; ``None``: any."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else None


def sum_over(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    """The sum of a tensor over the ranks of a group, on the device that the group sends from. A collective.

    Args:
        group: of the ranks.
        tensor: on any device, such as a gradient that is offloaded to the CPU; may be changed.
    """
    device = device_of(group)
    total = tensor if device is None else tensor.to(device)
    dist.all_reduce(total, group=group)
    return total


def wait_for_key(store: dist.Store, key: str, pause: Callable[[float], object] = time.sleep) -> str | None:
    """The value of a key of a store, once it is there, however long that takes.

    ``store.wait`` writes a warning to the standard error whenever its time is over, and is not to be interrupted.

    Args:
        store: where to look.
        key: that somebody will set.
        pause: called with the seconds to sleep between two looks; if it answers with something true, waiting ends.

    Returns:
        The value; ``None`` if ``pause`` has ended it.

    Raises:
        RuntimeError: if the store is gone.
    """
    seconds = _FIRST_PAUSE
    while not store.check([key]):
        if pause(seconds):
            return None
        seconds = min(seconds * 1.5, _LONGEST_PAUSE)
    value: str = store.get(key).decode(errors="replace")
    return value


def leave_groups() -> None:
    """Leave the default process group and with it all others, so that this process can meet other ranks anew.

    The others need not be there. Groups whose collectives never end, because a peer is gone, are aborted.
    """
    gc.collect()  # DistributedDataParallel holds on to the group; over gloo its threads abort a process without it
    if not abort_groups() and dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    forget_meshes()


def abort_groups() -> bool:
    """Abort all process groups if they are NCCL's, whose kernels wait for a peer that is gone; from any thread.

    Returns:
        Whether they were. Those of another backend are left as they are.
    """
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return False
    from trainwright.core.torch_internals import _abort_process_group

    _abort_process_group()
    return True


def forget_meshes() -> None:
    """Clear what DTensor remembers of operations on earlier meshes.

    Meshes of the same ranks and axes count as equal there, whatever their process groups: later ones would be handed
    the groups of earlier ones, which are gone or, under the same name, other ranks by now. That hangs, or writes beyond
    a buffer.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from trainwright.core.torch_internals import _clear_sharding_prop_cache, _redistribute

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
