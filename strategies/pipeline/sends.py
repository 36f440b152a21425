"""Early release of sent tensors in pipeline schedules.

Torch's schedules for several stages per rank keep every send handle, and its tensor, until the end of the step:
activations and gradients of all micro-batches. Waiting earlier may deadlock, unless the receiver has started to
receive, which is known once something that it sent later has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

# Short name of a torch schedule action, stage, micro-batch.
Place = tuple[str, int, int]

# Kind of a computation -> the kind of its receive, and the kind and relative stage of the matching send.
_RECEIVES = {"F": ("RECV_F", "SEND_F", -1), "B": ("RECV_B", "SEND_B", 1), "I": ("RECV_B", "SEND_B", 1)}
# Kind of a send -> the kind and relative stage of its receive.
_TAKEN = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}


def releasable_sends(orders: Mapping[int, Sequence[Place]], rank: int) -> dict[Place, list[Place]]:
    """Return, for each computation of a rank, the sends whose receivers have started by then.

    Each send is listed at the first such computation, or not at all.

    Args:
        orders: actions of every rank, in order.
        rank: of the pipeline.
    """
    where = {place: (holder, at) for holder, order in orders.items() for at, place in enumerate(order)}
    # Of each other rank: own computations in order, and its position when it sent their input.
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
    """Sends of one rank in one step.

    Args:
        taken: from :func:`releasable_sends`.
    """

    def __init__(self, taken: Mapping[Place, Sequence[Place]]) -> None:
        self._taken = taken
        self._works: dict[Place, list[Any]] = {}

    def begin(self, place: Place, ops: Sequence[dist.P2POp]) -> None:
        """Start sending; the handles hold the tensors."""
        self._works[place] = [op.op(op.tensor, group=op.group, group_dst=op.group_peer) for op in ops]

    def computes(self, place: Place) -> None:
        """Release sends known to be received when a computation starts."""
        for sent in self._taken.get(place, ()):
            self._wait(sent)

    def finish(self) -> None:
        """Wait for all other sends, at the end of the step."""
        for sent in list(self._works):
            self._wait(sent)

    def _wait(self, sent: Place) -> None:
        for work in self._works.pop(sent, ()):
            work.wait()
