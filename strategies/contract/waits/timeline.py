"""When the stages of a rank are busy: taken while somebody asks for it, free otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from trainwright.strategies.contract.waits.waiting import make_spans


class TimelineEntry(NamedTuple):
    """One piece of work of a stage.

    Args:
        begin: seconds since the first mark.
        end: likewise.
        what: ``"forward"``, ``"backward"`` (of inputs and weights, or of inputs alone), ``"weight"`` (the backward of
            weights, where it comes apart) or ``"optimizer"``.
        micro_batch: its number; ``-1``: of none.
        stage: its number; ``-1``: of all stages of the rank.
    """

    begin: float
    end: float
    what: str
    micro_batch: int
    stage: int


# Methods of a stage that torch's schedules call, the micro-batch first.
_WORK = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weight"}


class HearsStages(Protocol):
    """Who wants to know when stages of this rank work; ``what`` as in :class:`TimelineEntry`."""

    def stage_begins(self, what: str, micro_batch: int, stage: int) -> None:
        """A stage begins to work."""

    def stage_ends(self, what: str, micro_batch: int, stage: int) -> None:
        """It has ended, with an error too."""


def listen_to_stages(stages: Sequence[Any], listener: HearsStages) -> Callable[[], None]:
    """Have ``listener`` told when one of ``stages`` works; returns how to end that, which may be called again."""
    for stage in stages:
        if not _listeners_of(stage):
            for method, what in _WORK.items():
                # On the object: the schedules look methods up there, and without listeners nothing is left of it.
                stage.__dict__[method] = _telling(stage, getattr(stage, method), what)
        stage.__dict__[_LISTENERS] = (*_listeners_of(stage), listener)
    return lambda: _leave(stages, listener)


_LISTENERS = "_trainwright_listeners"


def _listeners_of(stage: Any) -> tuple[HearsStages, ...]:
    found: tuple[HearsStages, ...] = stage.__dict__.get(_LISTENERS, ())
    return found


def _leave(stages: Sequence[Any], listener: HearsStages) -> None:
    for stage in stages:
        stage.__dict__[_LISTENERS] = tuple(each for each in _listeners_of(stage) if each is not listener)
        if not stage.__dict__[_LISTENERS]:
            for name in (*_WORK, _LISTENERS):
                stage.__dict__.pop(name, None)


def _telling(stage: Any, work: Callable[..., Any], what: str) -> Callable[..., Any]:
    def told(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        listeners = _listeners_of(stage)
        for listener in listeners:
            listener.stage_begins(what, micro_batch, stage.stage_index)
        try:
            return work(micro_batch, *args, **kwargs)
        finally:
            for listener in listeners:
                listener.stage_ends(what, micro_batch, stage.stage_index)

    return told


class StageTimeline:
    """Takes the times at which stages begin and end to work, from :meth:`start` to :meth:`stop`.

    On CUDA, times are those of the stream that computes, by events; reading them waits for the device. What a rank
    waits for within the work of a stage (the parameters of a shard, say) counts as work.

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
        self._leave: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin: the first mark."""
        self._marks, self._last, self._optimizer = [], None, None
        self._first = self._mark()
        if self._leave is None:
            self._leave = listen_to_stages(self._stages, self)

    def stage_begins(self, what: str, micro_batch: int, stage: int) -> None:
        """A stage begins to work: one mark."""
        self._begin = self._mark()

    def stage_ends(self, what: str, micro_batch: int, stage: int) -> None:
        """It has ended: another mark."""
        self._marks.append((self._begin, self._mark(), what, micro_batch, stage))

    def optimizer(self) -> None:
        """The optimizer begins, which works until :meth:`stop`."""
        if self._optimizer is None:
            self._optimizer = self._mark()

    def stop(self) -> None:
        """End: the last mark."""
        if self._leave is not None:
            self._leave()
            self._leave = None
        if self._first is not None and self._last is None:
            self._last = self._mark()

    def take(self) -> tuple[float, list[TimelineEntry]]:
        """Seconds from the first mark to the last, and what the stages did in between, by beginning."""
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
