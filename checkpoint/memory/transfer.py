"""Transfer of a snapshot from one rank's memory to another's."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from trainwright.checkpoint.memory.replicas import pack, start, unpack, wait_for
from trainwright.checkpoint.memory.snapshots import Snapshot
from trainwright.checkpoint.write.staging import lay_out

TRANSFERRED = "handed_over"
"""Key in ``about`` of a snapshot made by another rank, whose random numbers must not be reused."""


def send(held: Snapshot, to: int, group: dist.ProcessGroup) -> None:
    """Send a snapshot; the other rank calls :func:`receive`.

    Args:
        held: of this rank; complete, see ``complete`` of ``strategy.run_state``.
        to: rank in ``group``.
        group: over gloo.
    """
    held.wait()
    header, (_, length) = pack(held.content, held.step), lay_out(held.content.tensors)
    wait_for(start(dist.isend, [torch.tensor([header.numel(), length])], to, group))
    wait_for(start(dist.isend, [header], to, group))
    boxes = [box for parts in held.content.tensors.values() for _, box in parts.parts]
    wait_for(start(dist.isend, [box.detach().contiguous().view(-1).view(torch.uint8) for box in boxes], to, group))


def receive(source: int, group: dist.ProcessGroup) -> Snapshot:
    """Receive a snapshot from another rank.

    Args:
        source: rank in ``group``.
        group: over gloo.
    """
    lengths = torch.empty(2, dtype=torch.int64)
    wait_for(start(dist.irecv, [lengths], source, group))
    header, block = (torch.empty(int(length), dtype=torch.uint8) for length in lengths)
    wait_for(start(dist.irecv, [header], source, group))
    held = unpack(header, block)
    # In the order of sending: that of the tensors in the header.
    boxes = [box for parts in held.content.tensors.values() for _, box in parts.parts]
    wait_for(start(dist.irecv, [box.view(-1).view(torch.uint8) for box in boxes], source, group))
    return mark_transferred(held)


def mark_transferred(held: Snapshot) -> Snapshot:
    """Mark a snapshot as made by another rank."""
    return replace(held, content=replace(held.content, about={**held.content.about, TRANSFERRED: True}))
