"""When the stages of a rank are busy: taken while somebody asks for it, free otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from trainwright.strategies.waiting import make_spans


class Entry(NamedTuple):
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


# Methods of a stage that torch's schedules call, and whether their first argument is a micro-batch.
_WORK = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weight"}


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
        self._first: Any = None
        self._last: Any = None
        self._optimizer: Any = None

    def start(self) -> None:
        """Begin: the first mark."""
        self._marks, self._last, self._optimizer = [], None, None
        self._first = self._mark()
        for stage in self._stages:
            for method, what in _WORK.items():
                # On the object: the schedules look methods up there, and after stop() nothing is left of it.
                stage.__dict__[method] = self._timed(getattr(stage, method), what, stage.stage_index)

    def optimizer(self) -> None:
        """The optimizer begins, which works until :meth:`stop`."""
        if self._optimizer is None:
            self._optimizer = self._mark()

    def stop(self) -> None:
        """End: the last mark."""
        for stage in self._stages:
            for method in _WORK:
                stage.__dict__.pop(method, None)
        if self._first is not None and self._last is None:
            self._last = self._mark()

    def take(self) -> tuple[float, list[Entry]]:
        """Seconds from the first mark to the last, and what the stages did in between, by beginning."""
        if self._device.type == "cuda":
            self._last.synchronize()
        marks = list(self._marks)
        if self._optimizer is not None:
            marks.append((self._optimizer, self._last, "optimizer", -1, -1))
        entries = [
            Entry(self._since(begin), self._since(end), what, micro_batch, stage)
            for begin, end, what, micro_batch, stage in marks
        ]
        return self._since(self._last), sorted(entries)

    def _since(self, mark: Any) -> float:
        if self._device.type == "cuda":
            return float(self._first.elapsed_time(mark)) / 1000
        return float(mark - self._first)

    def _timed(self, work: Callable[..., Any], what: str, stage: int) -> Callable[..., Any]:
        def timed(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            begin = self._mark()
            try:
                return work(micro_batch, *args, **kwargs)
            finally:
                self._marks.append((begin, self._mark(), what, micro_batch, stage))

        return timed
