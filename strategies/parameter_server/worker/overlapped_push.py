"""Pushes of gradients in parts during backward, and detection of later changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from trainwright.strategies.parameter_server.messages.wire import PART, Sending
from trainwright.strategies.parameter_server.server.shard import ShardPlan
from trainwright.strategies.parameter_server.server.sharder import Slice, places

# Consecutive steps with changed gradients after which pushes during backward stop: they are sent twice.
_PATIENCE = 3


class OverlappedPush:
    """Sends a part of a server as soon as backward has computed all of its gradients.

    Args:
        plan: with parts.
        parameters: in plan order. Parts do not wait for frozen ones.
        flats: buffers of each server, unchanged during a send.
        announce: tells a server that parts follow.
        send: sends a tensor to a server with a tag.
    """

    def __init__(
        self,
        plan: ShardPlan,
        parameters: Sequence[Tensor],
        flats: Sequence[Tensor],
        announce: Callable[[int], Sequence[Sending]],
        send: Callable[[int, Tensor, int], Sending],
    ) -> None:
        self._plan, self._parameters, self._flats = plan, parameters, flats
        self._announce, self._send = announce, send
        self._runs = False
        self._missing: dict[tuple[int, int], set[int]] = {}
        self._sent: dict[int, dict[int, Sending]] = {}  # of each announced server, its parts
        self._announced: dict[int, Sequence[Sending]] = {}
        self._resent_steps = 0
        self._changed = False
        self._parts: dict[int, list[tuple[int, int]]] = {}
        self._members = {
            (s, n): self._members_of(s, n) for s, parts in enumerate(plan.parts) for n in range(len(parts))
        }
        self._hooks = ExitStack()
        for index in self._parts:
            self._hooks.enter_context(parameters[index].register_post_accumulate_grad_hook(partial(self._made, index)))

    def _members_of(self, server: int, number: int) -> frozenset[int]:
        part = self._plan.parts[server][number]
        within = {self._plan.held[server][each].parameter for each in part.slices} if part.is_early else set()
        members = frozenset(index for index in within if self._parameters[index].requires_grad)
        for index in members:
            self._parts.setdefault(index, []).append((server, number))
        return members

    @property
    def is_ineffective(self) -> bool:
        """True if gradients of all recent steps had to be sent again."""
        return self._resent_steps >= _PATIENCE

    def begin(self) -> None:
        """Start; the next backward is the last of a step."""
        for server, sent in self._sent.items():  # of a skipped step
            for each in (*self._announced[server], *sent.values(), *self._send_others(server, sent).values()):
                each.wait()
        self._resent_steps = self._resent_steps + 1 if self._changed else 0
        self._sent, self._announced, self._changed = {}, {}, False
        self._missing = {key: set(members) for key, members in self._members.items() if members}
        self._runs = True

    def close(self) -> None:
        """Remove the hooks."""
        self._runs = False
        self._hooks.close()

    def _made(self, index: int, _: Tensor) -> None:
        if not self._runs:
            return
        for key in self._parts[index]:
            missing = self._missing.get(key)
            if missing is None:
                continue  # in flight: a change is detected in the step
            missing.discard(index)
            if not missing:
                del self._missing[key]
                self._begin_part(*key)

    def _begin_part(self, server: int, number: int) -> None:
        if server not in self._sent:
            self._announced[server], self._sent[server] = self._announce(server), {}
        self._sent[server][number] = self._send_part(server, number)

    def _send_part(self, server: int, number: int) -> Sending:
        part = self._plan.parts[server][number]
        held, values = self._plan.held[server][part.first : part.last], self._flats[server][part.start : part.stop]
        for piece, place in places(held, values):
            copy_slice(self._parameters[piece.parameter].grad, piece, place)
        return self._send(server, values, PART + number)

    def _send_others(self, server: int, sent: dict[int, Sending]) -> dict[int, Sending]:
        """Send the parts that were not ready."""
        parts = enumerate(self._plan.parts[server])
        return {n: self._send_part(server, n) for n, part in parts if part.is_early and n not in sent}

    def end(self, server: int) -> tuple[list[Sending], list[int]] | None:
        """Send all remaining parts to a server.

        Returns:
            Messages in flight, and indices of slices to follow, whose gradients are in no part or have changed.
                ``None``: nothing was sent during backward.
        """
        self._runs = False
        if server not in self._sent:
            return None
        sent = self._sent.pop(server)
        others = self._send_others(server, sent)
        numbers = (number for number in range(len(self._plan.parts[server])) if number not in others)
        late = [each for number in numbers for each in self._late(server, number)]
        return [*self._announced.pop(server), *sent.values(), *others.values()], late

    def _late(self, server: int, number: int) -> list[int]:
        part = self._plan.parts[server][number]
        held, values = self._plan.held[server][part.first : part.last], self._flats[server][part.start : part.stop]
        found = []
        for each, (piece, was) in zip(part.slices, places(held, values), strict=True):
            gradient = self._parameters[piece.parameter].grad
            if _differs(gradient, piece, was) if part.is_early else gradient is not None:
                found.append(each)
        self._changed |= bool(found) and part.is_early
        return found


def copy_slice(gradient: Tensor | None, piece: Slice, target: Tensor) -> None:
    """Copy a slice of a gradient (zeros if missing) into ``target``, flat ``(piece.numel,)``."""
    if gradient is None:
        target.zero_()
    else:
        target.view(piece.shape).copy_(rows(gradient, piece))


def rows(gradient: Tensor, piece: Slice) -> Tensor:
    """Return a slice of a gradient or parameter."""
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient[piece.start : piece.stop] if gradient.dim() else gradient


def _differs(gradient: Tensor | None, piece: Slice, sent: Tensor) -> bool:
    if gradient is None:
        return bool(sent.any())
    return not torch.equal(sent.view(piece.shape), rows(gradient, piece).to(sent.device, sent.dtype))
