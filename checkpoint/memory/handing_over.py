"""Giving the state that one rank holds in memory to another rank, without a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.memory.held import HeldState
from trainwright.checkpoint.memory.replicas import pack, unpack
from trainwright.checkpoint.write.staging import lay_out

HANDED_OVER = "handed_over"
"""In what a state says of itself: it was made by another rank, whose random numbers must not be drawn twice."""

# What one message carries at most; larger ones are cut, so that no counter of the network's has to hold them.
_MESSAGE = 2**30


def send(held: HeldState, to: int, group: dist.ProcessGroup) -> None:
    """Send a state; the other rank calls :func:`receive`.

    Args:
        held: what this rank holds; complete, see ``complete`` of ``strategy.run_state``.
        to: rank in ``group``.
        group: over gloo.
    """
    held.wait()
    slots, length = lay_out(held.content.tensors)
    header = pack(held.content, slots, held.step)
    _send([torch.tensor([header.numel(), length])], to, group)
    _send([header], to, group)
    boxes = [box for parts in held.content.tensors.values() for _, box in parts.parts]
    _send([_bytes_of(box) for box in boxes], to, group)


def receive(source: int, group: dist.ProcessGroup) -> HeldState:
    """What another rank sends.

    Args:
        source: rank in ``group``.
        group: over gloo.
    """
    lengths = torch.empty(2, dtype=torch.int64)
    _receive([lengths], source, group)
    header, block = (torch.empty(int(length), dtype=torch.uint8) for length in lengths)
    _receive([header], source, group)
    held = unpack(header, block)
    # In the order in which they were sent: that of the tensors, which the header keeps.
    boxes = [box for parts in held.content.tensors.values() for _, box in parts.parts]
    _receive([box.view(-1).view(torch.uint8) for box in boxes], source, group)
    return handed_over(held)


def handed_over(held: HeldState) -> HeldState:
    """A state that says of itself that another rank made it."""
    return replace(held, content=replace(held.content, about={**held.content.about, HANDED_OVER: True}))


def _bytes_of(box: Tensor) -> Tensor:
    return box.detach().contiguous().view(-1).view(torch.uint8)


def _send(tensors: Sequence[Tensor], to: int, group: dist.ProcessGroup) -> None:
    """Send tensors that the other rank takes with one call of :func:`_receive`."""
    rank = dist.get_global_rank(group, to)
    # All at once: a state has hundreds of small tensors, and each would wait for an answer.
    works = [dist.isend(piece, rank, group=group, tag=number) for number, piece in enumerate(_pieces(tensors))]
    _wait_for(works)


def _receive(tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup) -> None:
    rank = dist.get_global_rank(group, source)
    works = [dist.irecv(piece, rank, group=group, tag=number) for number, piece in enumerate(_pieces(tensors))]
    _wait_for(works)


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [piece for tensor in tensors if tensor.numel() for piece in tensor.split(_MESSAGE)]


def _wait_for(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None  # this rank is one of the group
        work.wait()
