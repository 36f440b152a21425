"""How long a rank waits for other ranks: measured while somebody asks for it, free otherwise.

Whatever a rank waits for in Python ends in ``Work.wait`` of ``torch.distributed``: collectives that return when they
are done, those that were begun earlier, sends and receives of a pipeline, FSDP2. So that method is exchanged while
somebody measures. ``DistributedDataParallel`` waits in C++, see :class:`ReducerWaits`.

On CUDA nobody waits in ``Work.wait``: it makes the stream wait. There an event before it and one behind it tell how
long the stream stood still, and so for events of other streams, by which FSDP2 waits. Events are read once they have
happened; the device is never waited for.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

# Spans of a device that are not read yet, at most; the oldest are dropped when nobody asks for the sums.
_MOST_SPANS = 1 << 14


class Spans:
    """Sums up spans of time by what they were spent for: by the clock, where the host itself computes."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def mark(self) -> Any:
        """The present instant of the device."""
        return time.perf_counter()

    def add(self, kind: str, begin: Any, end: Any) -> None:
        """Count the time between two marks as ``kind``."""
        self._seconds[kind] += end - begin

    def take(self) -> dict[str, float]:
        """Seconds by kind since the last call; what the device has not done yet is told by the next one."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    def settle(self) -> None:
        """Wait until the device has done what was added."""


class StreamSpans(Spans):
    """By events of a CUDA stream. A span in which the host is late, and the stream has nothing to do, is as long.

    Args:
        device: whose current stream is marked.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._open: deque[tuple[str, Any, Any]] = deque(maxlen=_MOST_SPANS)

    def mark(self) -> Any:
        """See :class:`Spans`."""
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, kind: str, begin: Any, end: Any) -> None:
        """See :class:`Spans`."""
        self._open.append((kind, begin, end))

    def take(self) -> dict[str, float]:
        """See :class:`Spans`."""
        while self._open and self._open[0][2].query():
            kind, begin, end = self._open.popleft()
            self._seconds[kind] += begin.elapsed_time(end) / 1000
        return super().take()

    def settle(self) -> None:
        """See :class:`Spans`."""
        if self._open:
            self._open[-1][2].synchronize()


class Waits:
    """Measures how long this rank waits for others, until it is stopped.

    Waits of the thread that makes it count, and of the threads in which its backward passes run: those that save
    checkpoints wait for other ranks too, which is no part of a step. On CUDA, waits of the stream that is used now.

    Args:
        device: of this rank.

    Attributes:
        spans: what was waited, by kind.
        kind: as what a wait counts that ends now.
    """

    def __init__(self, device: torch.device) -> None:
        self.spans = make_spans(device)
        self.kind = ""
        self._thread = threading.get_ident()
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        if dist.is_available() and dist.is_initialized():
            _Interception.add(self, with_streams=self._stream is not None)

    def new_spans(self) -> Spans:
        """Spans of the same device, for what else is to be measured."""
        return make_spans(self._device)

    def refresh(self) -> None:
        """To be called now and then between two steps: what was found out about a step may have changed."""

    def stop(self) -> None:
        """End measuring; may be called again."""
        _Interception.remove(self)

    def is_meant(self) -> bool:
        """Whether a wait that begins now counts."""
        if self._stream is None:
            return threading.get_ident() == self._thread
        is_ours = threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1
        return is_ours and torch.cuda.current_stream(self._device) == self._stream

    def end(self, begin: Any) -> None:
        """A wait that began at a mark of :attr:`spans` ends."""
        self.spans.add(self.kind, begin, self.spans.mark())


class ReducerWaits(Waits):
    """Counts too how long backward goes on after the last gradient of this rank.

    That is when ``DistributedDataParallel`` waits for the buckets that are still on their way. Which gradient is the
    last is found out in a backward pass whose every gradient is looked at: the first, and the first after
    :meth:`refresh`.

    Args:
        device: of this rank.
        parameters: of the module.
    """

    def __init__(self, device: torch.device, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(device)
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._last: nn.Parameter | None = None
        self._begin: Any = None
        self._handles: list[Any] = []
        self.refresh()

    def refresh(self) -> None:
        """Find out anew which gradient is the last."""
        self._listen(self._parameters)

    def stop(self) -> None:
        """End measuring; may be called again."""
        self._listen([])
        super().stop()

    def _listen(self, parameters: list[nn.Parameter]) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = [parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in parameters]

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._begin is None:
            Variable._execution_engine.queue_callback(self._queue)
        self._last, self._begin = parameter, self.spans.mark()

    def _queue(self) -> None:
        # Behind what the reducer has queued meanwhile: its wait.
        Variable._execution_engine.queue_callback(self._on_end)

    def _on_end(self) -> None:
        self.end(self._begin)
        self._begin = None
        if len(self._handles) > 1 and self._last is not None:
            self._listen([self._last])


class _Interception:
    """Exchanges what waits while somebody measures."""

    active: tuple[Waits, ...] = ()
    usual: dict[tuple[Any, str], Any] = {}  # noqa: RUF012 - (class, name) -> what was exchanged, of the process

    @classmethod
    def add(cls, waits: Waits, with_streams: bool) -> None:
        cls.active = (*cls.active, waits)
        cls._exchange(dist.Work, "wait")
        if with_streams:
            cls._exchange(torch.cuda.Stream, "wait_event")

    @classmethod
    def remove(cls, waits: Waits) -> None:
        cls.active = tuple(each for each in cls.active if each is not waits)
        if not cls.active:
            for (kind, name), function in cls.usual.items():
                setattr(kind, name, function)
            cls.usual.clear()

    @classmethod
    def _exchange(cls, kind: Any, name: str) -> None:
        if (kind, name) in cls.usual:
            return
        usual = cls.usual[kind, name] = getattr(kind, name)

        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            meant = [(each, each.spans.mark()) for each in cls.active if each.is_meant()]
            try:
                return usual(self, *args, **kwargs)
            finally:
                for each, begin in meant:
                    each.end(begin)

        setattr(kind, name, wait)


def make_spans(device: torch.device) -> Spans:
    """Spans in the time of a device."""
    return StreamSpans(device) if device.type == "cuda" else Spans()
