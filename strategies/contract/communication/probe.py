"""A short look at how fast the axes of a layout are: all-reduces of two sizes over their ranks."""

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
    """Measure axes one after the other, all groups of an axis at the same time; a collective of all ranks.

    Each group is made for this and ended. Of the times the median of 5 counts, and of the ranks the slowest; so all
    ranks know the same.

    Args:
        axes: name of the link, a closed layout of all ranks, and its axis; those with one rank are left out.
        device: that the ranks send from.
    """
    return [_probe(name, layout, axis, device) for name, layout, axis in axes if getattr(layout, axis) > 1]


def probe_ways(ways: Mapping[str, Callable[[Tensor], None]], device: torch.device) -> list[Way]:
    """Measure ways to average, one after the other; a collective of all ranks.

    As of :func:`probe_links`: medians of 5, the slowest rank, the same on all.

    Args:
        ways: name -> what averages a flat tensor in place.
        device: that the ranks send from.
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
    return median(taken[1:])  # the first one makes connections


def now_on(device: torch.device) -> float:
    """Seconds of a clock at which all is done that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
