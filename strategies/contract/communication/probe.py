"""Short measurement of a layout's axes, by all-reduces of two sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.core.layout import Layout
from trainwright.strategies.contract.communication.advice import MeasuredLink, Way, fit_link, fit_way
from trainwright.strategies.contract.groups import new_subgroup

SIZES = (4 * 2**10, 4 * 2**20)
"""Bytes of the two tensors."""
_REPEATS = 5


def probe_links(axes: Sequence[tuple[str, Layout, str]], device: torch.device) -> list[MeasuredLink]:
    """Measure axes one by one, all groups of an axis at once. A collective of all ranks.

    Uses temporary groups. The result is the median of 5 on the slowest rank, equal on all ranks.

    Args:
        axes: name of the link, a closed layout of all ranks, and its axis; axes of size 1 are skipped.
        device: of the tensors.
    """
    return [_probe(name, layout, axis, device) for name, layout, axis in axes if getattr(layout, axis) > 1]


def probe_ways(ways: Mapping[str, Callable[[Tensor], None]], device: torch.device) -> list[Way]:
    """Measure methods to average, one by one. A collective of all ranks; the result is as in :func:`probe_links`.

    Args:
        ways: name -> function that averages a flat tensor in place.
        device: of the tensors.
    """
    seconds = [[_median_seconds(way, None, size, device) for size in SIZES] for way in ways.values()]
    slowest = torch.tensor(seconds, dtype=torch.float32).to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [fit_way(name, SIZES, (small, large)) for name, (small, large) in zip(ways, slowest.tolist(), strict=True)]


def _probe(name: str, layout: Layout, axis: str, device: torch.device) -> MeasuredLink:
    own = new_subgroup(layout.groups(axis))
    assert own is not None
    send = partial(dist.all_reduce, group=own)
    seconds = torch.tensor([_median_seconds(send, own, size, device) for size in SIZES], dtype=torch.float64)
    seconds = seconds.to(device, torch.float32)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.destroy_process_group(own)
    small, large = seconds.tolist()
    return fit_link(name, getattr(layout, axis), SIZES, (small, large))


def _median_seconds(
    send: Callable[[Tensor], object], group: dist.ProcessGroup | None, size: int, device: torch.device
) -> float:
    tensor = torch.zeros(size // 4, device=device)
    taken = []
    for _ in range(1 + _REPEATS):
        dist.barrier(group)
        begin = now_on(device)
        send(tensor)
        taken.append(now_on(device) - begin)
    return median(taken[1:])  # the first one opens connections


def now_on(device: torch.device) -> float:
    """Return the host's clock after synchronizing the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
