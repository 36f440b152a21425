"""Transfer of a snapshot to another rank."""

from typing import Any

import torch
import torch.distributed as dist

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.memory.snapshots import Snapshot
from trainwright.checkpoint.memory.transfer import TRANSFERRED, receive, send
from trainwright.checkpoint.write.save import Content


def state() -> Snapshot:
    tensors = {
        "whole": TensorParts.whole(torch.arange(6.0).view(2, 3)),
        "boxes": TensorParts(
            (4, 2), torch.bfloat16, [((0, 0), torch.ones(1, 2).bfloat16()), ((3, 0), torch.zeros(1, 2).bfloat16())]
        ),
        "scalar": TensorParts.whole(torch.tensor(7)),
        "nothing": TensorParts.whole(torch.empty(0, 5)),
        "flags": TensorParts.whole(torch.tensor([True, False])),
        "strided": TensorParts.whole(torch.arange(12).view(3, 4).T),
    }
    return Snapshot(9, Content({"plain": [1, "two", None]}, tensors, {"kind": "run state"}))


def hand_over() -> dict[str, Any] | None:
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 0:
        send(state(), 1, group)
        return None
    held = receive(0, group)
    assert held.step == 9
    assert held.content.tree == {"plain": [1, "two", None]}
    assert held.content.about == {"kind": "run state", TRANSFERRED: True}
    return {
        key: (parts.shape, parts.dtype, [(offsets, box.clone()) for offsets, box in parts.parts])
        for key, parts in held.content.tensors.items()
    }


def test_transfer(ranks):
    _, received = ranks(hand_over, 2)
    sent = state().content.tensors
    assert list(received) == list(sent)
    for key, (shape, dtype, boxes) in received.items():
        assert (shape, dtype) == (sent[key].shape, sent[key].dtype)
        for (offsets, box), (own, expected) in zip(boxes, sent[key].parts, strict=True):
            assert tuple(offsets) == tuple(own)
            assert torch.equal(box, expected)
