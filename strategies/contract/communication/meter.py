"""Meter of the bytes this rank sends, by mesh axis and kind of collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch.distributed as dist

from trainwright.core.layout import Layout
from trainwright.strategies.contract.communication.calls import CollectiveCall, listen, unknown_operators
from trainwright.strategies.contract.communication.costs import least_bytes, sent_bytes

WORLD = "world"
OTHER = "other"
# ZeRO shards over both as one axis.
_STATE = ("shard", "context")


def name_of(ranks: Iterable[int], kind: str, layout: Layout) -> str:
    """Return the name under which a group's collectives are counted.

    The axis along which its ranks differ; ``"expert_shard"`` for ranks with the same experts; several axes joined
    (``"shard-context"``); ``"world"`` for all ranks of a layout with several axes; or ``"other"``. If a group is both
    ``expert`` and a dense axis, all-to-alls count as the experts' (``"context-expert"`` if the axis is context, since
    Ulysses attention has all-to-alls too).

    Args:
        ranks: global ranks of the group.
        kind: of collective.
        layout: closed.
    """
    wanted = sorted(ranks)
    dense = next((axis for axis in _used(layout) if _differ_along(wanted, layout, axis)), None)
    if layout.expert > 1:
        experts = _differ_along(wanted, layout, "expert")
        if experts and (dense is None or kind == "all_to_all"):
            return "context-expert" if dense == "context" else "expert"
        if dense is None and _differ_along(wanted, layout, "expert_shard"):
            return "expert_shard"
    return dense or _name_of_several(wanted, layout)


def _name_of_several(wanted: list[int], layout: Layout) -> str:
    used = _used(layout)
    for count in range(2, len(used) + 1):
        for axes in combinations(used, count):
            if _differ_along(wanted, layout, *axes):
                return WORLD if len(axes) == len(used) and axes != _STATE else "-".join(axes)
    return OTHER


def _used(layout: Layout) -> list[str]:
    return [axis for axis, size in layout.sizes.items() if size > 1]


def _differ_along(wanted: list[int], layout: Layout, *axes: str) -> bool:
    return len(wanted) > 1 and wanted == layout.group_of(wanted[0], *axes)


@dataclass(frozen=True)
class Sent:
    """Data sent by one rank along one axis in one kind of collective.

    Args:
        calls: number of collectives or messages.
        bytes: sent by the backend.
        least: sent by the best algorithm, on average over the ranks.
    """

    calls: int = 0
    bytes: float = 0.0
    least: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.calls + other.calls, self.bytes + other.bytes, self.least + other.least)


Counts = dict[tuple[str, str], Sent]
_active: list[CommunicationMeter] = []  # meters of this process


class CommunicationMeter(AbstractContextManager[Any]):
    """Counter of the bytes this rank sends, from construction until :meth:`stop`; also a context manager.

    Every collective of ``torch.distributed`` counts when it starts
    (:mod:`~trainwright.strategies.contract.communication.calls`), with the bytes that its backend sends (``costs``).
    Traffic over other links is reported by :func:`count_sent`. Headers, stores and barriers do not count.

    Args:
        layout: closed, of all ranks, for the names of axes; ``None``: everything counts as ``"other"``.
        names: of groups that are no axis, by their sorted ranks.
    """

    def __init__(self, layout: Layout | None = None, names: Mapping[tuple[int, ...], str] | None = None) -> None:
        self._group_names = dict(names or {})
        self._layout = layout
        self._counts: Counts = {}
        self._names: dict[tuple[dist.ProcessGroup, str], str] = {}
        self._lock = threading.Lock()  # autograd and servers send from their own threads
        self._stop: Callable[[], None] | None = None
        if dist.is_available() and dist.is_initialized():
            self._stop = listen(self._on_call)
        _active.append(self)

    @property
    def unknown(self) -> list[str]:
        """Operators of this version of torch that may communicate but are not counted."""
        return unknown_operators()

    def take(self) -> Counts:
        """Return and reset the counts: (axis, kind of collective) -> sums."""
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken

    def stop(self) -> None:
        """Stop counting; idempotent. Counts can still be taken."""
        if self in _active:
            _active.remove(self)
        if self._stop is not None:
            self._stop()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _on_call(self, call: CollectiveCall) -> None:
        ranks = call.group.size()
        if ranks == 1 or call.kind == "barrier":
            return
        place = call.place
        least = least_bytes(call.kind, call.size, ranks, place)
        sent = sent_bytes(call.kind, call.size, ranks, place, call.backend)
        self._add(self._axis_of(call), call.kind, Sent(1, sent, least))

    def _axis_of(self, call: CollectiveCall) -> str:
        key = (call.group, call.kind)
        if key not in self._names:
            self._names[key] = self._name(call)
        return self._names[key]

    def _name(self, call: CollectiveCall) -> str:
        if self._layout is None or self._layout.world_size != dist.get_world_size():
            return OTHER
        try:
            ranks = dist.get_process_group_ranks(call.group)
        except (KeyError, ValueError):  # a group that torch does not track
            return OTHER
        given = self._group_names.get(tuple(sorted(ranks)))
        return given or name_of(ranks, call.kind, self._layout)

    def _add(self, axis: str, kind: str, sent: Sent) -> None:
        with self._lock:
            self._counts[axis, kind] = self._counts.get((axis, kind), Sent()) + sent


def count_sent(axis: str, kind: str, sent: float) -> None:
    """Report a message over a link outside of torch's process groups to all meters of this process.

    Args:
        axis: such as ``"server"``.
        kind: such as ``"push"``.
        sent: bytes.
    """
    for meter in tuple(_active):  # another thread may start or stop one
        meter._add(axis, kind, Sent(1, sent, sent))
