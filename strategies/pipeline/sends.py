"""What a rank of a pipeline has sent in a step, let go of as soon as it is known to have been taken.

Torch's schedules for several stages of a rank keep the handle of every send, and with it the tensor, until the step
ends: the activations and gradients of all micro-batches, however few of them are in flight. Waiting earlier may wait
for a rank that waits for this one, unless the receiver has begun to receive: then a wait ends by itself. That is known
when something has come from it that it sent later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

# Kind of an action of torch's schedules (its short name), stage, micro-batch.
Place = tuple[str, int, int]

# Kind of a computation -> that of the receive before it, and where what it receives was sent from: kind and stage.
_RECEIVES = {"F": ("RECV_F", "SEND_F", -1), "B": ("RECV_B", "SEND_B", 1), "I": ("RECV_B", "SEND_B", 1)}
# Kind of a send -> that of its receive, and of which stage.
_TAKEN = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}


def known_to_be_taken(orders: Mapping[int, Sequence[Place]], rank: int) -> dict[Place, list[Place]]:
    """For each computation of a rank, its sends whose receivers have begun to receive by the time that it begins.

    A send is named once, with the first computation of which that is known; not at all if there is none.

    Args:
        orders: what every rank does, in order.
        rank: of the pipeline.
    """
    where = {place: (holder, at) for holder, order in orders.items() for at, place in enumerate(order)}
    # Of each other rank: own computations in order, and how far it had got when it sent what they wait for.
    heard: dict[int, list[tuple[int, Place, int]]] = {}
    for at, place in enumerate(orders[rank]):
        kind, stage, part = place
        receive, send, step = _RECEIVES.get(kind, ("", "", 0))
        if (receive, stage, part) in where:
            sender, sent_at = where[send, stage + step, part]
            heard.setdefault(sender, []).append((at, place, sent_at))
    found: dict[Place, list[Place]] = {}
    for at, place in enumerate(orders[rank]):
        kind, stage, part = place
        if kind in _TAKEN:
            receive, step = _TAKEN[kind]
            receiver, taken_at = where[receive, stage + step, part]
            known = (then for later, then, sent_at in heard.get(receiver, ()) if later > at and sent_at > taken_at)
            first = next(known, None)
            if first is not None:
                found.setdefault(first, []).append(place)
    return found


class Sends:
    """The sends of one rank in one step.

    Args:
        taken: of :func:`known_to_be_taken`.
    """

    def __init__(self, taken: Mapping[Place, Sequence[Place]]) -> None:
        self._taken = taken
        self._works: dict[Place, list[Any]] = {}

    def begin(self, place: Place, ops: Sequence[dist.P2POp]) -> None:
        """Begin to send; the handles hold the tensors."""
        self._works[place] = [op.op(op.tensor, group=op.group, group_dst=op.group_peer) for op in ops]

    def computes(self, place: Place) -> None:
        """Let go of what is known to have been taken when a computation begins."""
        for sent in self._taken.get(place, ()):
            self._wait(sent)

    def finish(self) -> None:
        """Wait for all others, at the end of the step."""
        for sent in list(self._works):
            self._wait(sent)

    def _wait(self, sent: Place) -> None:
        for work in self._works.pop(sent, ()):
            work.wait()
