"""Timeline of the pipeline stages of a rank; no overhead unless requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from trainwright.strategies.contract.waits.waiting import make_spans


class TimelineEntry(NamedTuple):
    """One operation of a stage.

    Args:
        begin: seconds since the first mark.
        end: seconds since the first mark.
        what: ``"forward"``, ``"backward"`` (of inputs and weights, or of inputs alone), ``"weight"`` (a separate
            backward of weights) or ``"optimizer"``.
        micro_batch: its index; ``-1``: none.
        stage: its index; ``-1``: all stages of the rank.
    """

    begin: float
    end: float
    what: str
    micro_batch: int
    stage: int


# Methods of a stage that torch's schedules call with the micro-batch as first argument.
_WORK = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weight"}


class StageListener(Protocol):
    """Listener for operations of stages; ``what`` as in :class:`TimelineEntry`."""

    def stage_begins(self, what: str, micro_batch: int, stage: int) -> None:
        """Handle the start of an operation."""

    def stage_ends(self, what: str, micro_batch: int, stage: int) -> None:
        """Handle its end, also after an error."""


def listen_to_stages(stages: Sequence[Any], listener: StageListener) -> Callable[[], None]:
    """Notify ``listener`` of every operation of ``stages``; returns an idempotent function that ends it."""
    for stage in stages:
        if not _listeners_of(stage):
            for method, what in _WORK.items():
                # On the instance, so that removing the last listener restores the class's methods.
                stage.__dict__[method] = _notifying(stage, getattr(stage, method), what)
        stage.__dict__[_LISTENERS] = (*_listeners_of(stage), listener)
    return lambda: _remove(stages, listener)


_LISTENERS = "_trainwright_listeners"


def _listeners_of(stage: Any) -> tuple[StageListener, ...]:
    found: tuple[StageListener, ...] = stage.__dict__.get(_LISTENERS, ())
    return found


def _remove(stages: Sequence[Any], listener: StageListener) -> None:
    for stage in stages:
        stage.__dict__[_LISTENERS] = tuple(each for each in _listeners_of(stage) if each is not listener)
        if not stage.__dict__[_LISTENERS]:
            for name in (*_WORK, _LISTENERS):
                stage.__dict__.pop(name, None)


def _notifying(stage: Any, work: Callable[..., Any], what: str) -> Callable[..., Any]:
    def notifying(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        listeners = _listeners_of(stage)
        for listener in listeners:
            listener.stage_begins(what, micro_batch, stage.stage_index)
        try:
            return work(micro_batch, *args, **kwargs)
        finally:
            for listener in listeners:
                listener.stage_ends(what, micro_batch, stage.stage_index)

    return notifying


class StageTimeline:
    """Recorder of when stages start and end operations, from :meth:`start` to :meth:`stop`.

    On CUDA, times are those of the compute stream, from events; reading them synchronizes. Waits within an operation
    (e.g. for sharded parameters) count as work.

    Args:
        stages: of this rank.
        device: of this rank.
    """

    def __init__(self, stages: Sequence[Any], device: torch.device) -> None:
        self._stages = stages
        self._device = device
        self._mark: Callable[[], Any] = make_spans(device).mark
        self._marks: list[tuple[Any, Any, str, int, int]] = []
        self._begin: Any = None
        self._first: Any = None
        self._last: Any = None
        self._optimizer: Any = None
        self._remove: Callable[[], None] | None = None

    def start(self) -> None:
        """Set the first mark."""
        self._marks, self._last, self._optimizer = [], None, None
        self._first = self._mark()
        if self._remove is None:
            self._remove = listen_to_stages(self._stages, self)

    def stage_begins(self, what: str, micro_batch: int, stage: int) -> None:
        """Mark the start of an operation."""
        self._begin = self._mark()

    def stage_ends(self, what: str, micro_batch: int, stage: int) -> None:
        """Mark its end."""
        self._marks.append((self._begin, self._mark(), what, micro_batch, stage))

    def optimizer(self) -> None:
        """Mark the start of the optimizer, which ends at :meth:`stop`."""
        if self._optimizer is None:
            self._optimizer = self._mark()

    def stop(self) -> None:
        """Set the last mark."""
        if self._remove is not None:
            self._remove()
            self._remove = None
        if self._first is not None and self._last is None:
            self._last = self._mark()

    def take(self) -> tuple[float, list[TimelineEntry]]:
        """Return the seconds from the first mark to the last, and the operations in between, sorted by start."""
        if self._device.type == "cuda":
            self._last.synchronize()
        marks = list(self._marks)
        if self._optimizer is not None:
            marks.append((self._optimizer, self._last, "optimizer", -1, -1))
        entries = [
            TimelineEntry(self._since(begin), self._since(end), what, micro_batch, stage)
            for begin, end, what, micro_batch, stage in marks
        ]
        return self._since(self._last), sorted(entries)

    def _since(self, mark: Any) -> float:
        if self._device.type == "cuda":
            return float(self._first.elapsed_time(mark)) / 1000
        return float(mark - self._first)
