"""Counts what this rank sends, by mesh axis and kind of collective, under any strategy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist

from trainwright.core.layout import Layout
from trainwright.strategies.contract.communication.axes import OTHER, name_of
from trainwright.strategies.contract.communication.calls import CollectiveCall, listen, unknown_operators
from trainwright.strategies.contract.communication.costs import least_bytes, sent_bytes


@dataclass(frozen=True)
class Sent:
    """What one rank has sent along one axis in one kind of collective.

    Args:
        calls: collectives, or messages.
        bytes: that the backend sends for them.
        least: bytes that the best algorithm sends, as a mean over the ranks.
    """

    calls: int = 0
    bytes: float = 0.0
    least: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.calls + other.calls, self.bytes + other.bytes, self.least + other.least)


Counts = dict[tuple[str, str], Sent]


class CommunicationMeter:
    """Counts what this rank sends, until it is stopped; as a context manager, while it is entered.

    Every collective of ``torch.distributed`` counts when it begins, whoever starts it
    (:mod:`~trainwright.strategies.contract.communication.calls`), as so many bytes as its backend sends for it
    (``costs``). What goes over other links is told by those who use them, by
    :func:`count_sent`. The bytes are those of the values: headers, stores and barriers do not count.

    Args:
        layout: closed, of all ranks; gives the axes their names. ``None``: all is counted under ``"other"``.
        names: of groups of ranks that are no axis, by their ranks in order.
    """

    def __init__(self, layout: Layout | None = None, names: Mapping[tuple[int, ...], str] | None = None) -> None:
        self._given_names = dict(names or {})
        self._layout = layout
        self._counts: Counts = {}
        self._names: dict[tuple[dist.ProcessGroup, str], str] = {}
        self._lock = threading.Lock()  # autograd and servers send from threads of their own
        self._end: Callable[[], None] | None = None
        if dist.is_available() and dist.is_initialized():
            self._end = listen(self._on_call)
        _Active.add(self)

    @property
    def unknown(self) -> list[str]:
        """Operators of this version of torch that may send something and are not counted; empty where all are known."""
        return unknown_operators()

    def count(self, axis: str, kind: str, sent: float) -> None:
        """Count a message that went over a link that is no process group of torch.

        Args:
            axis: along which, such as ``"server"``.
            kind: what it was, such as ``"push"``.
            sent: bytes.
        """
        self._add(axis, kind, Sent(1, sent, sent))

    def take(self) -> Counts:
        """What was sent since the last call: (axis, kind of collective) -> sums."""
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken

    def stop(self) -> None:
        """End counting; may be called again. What was counted can still be taken."""
        _Active.remove(self)
        if self._end is not None:
            self._end()

    def __enter__(self) -> CommunicationMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        except (KeyError, ValueError):  # made without torch's book of groups
            return OTHER
        given = self._given_names.get(tuple(sorted(ranks)))
        return given or name_of(ranks, call.kind, self._layout)

    def _add(self, axis: str, kind: str, sent: Sent) -> None:
        with self._lock:
            self._counts[axis, kind] = self._counts.get((axis, kind), Sent()) + sent


def count_sent(axis: str, kind: str, sent: float) -> None:
    """Tell every meter of this process of a message that went over a link that is no process group of torch.

    Costs nothing while nobody measures. See :meth:`CommunicationMeter.count`.
    """
    for meter in _Active.meters:
        meter.count(axis, kind, sent)


class _Active:
    """The meters that count now."""

    meters: tuple[CommunicationMeter, ...] = ()

    @classmethod
    def add(cls, meter: CommunicationMeter) -> None:
        cls.meters = (*cls.meters, meter)

    @classmethod
    def remove(cls, meter: CommunicationMeter) -> None:
        cls.meters = tuple(each for each in cls.meters if each is not meter)
