"""Time that a rank waits for other ranks; no overhead unless requested.

All waits in Python go through ``Work.wait`` of ``torch.distributed``: synchronous and asynchronous collectives, sends
and receives of a pipeline, FSDP2. That method is patched while waits are measured. ``DistributedDataParallel`` waits in
C++, see :class:`ReducerWaits`.

On CUDA, ``Work.wait`` blocks the stream, not the host. Events before and after it give the time the stream was idle;
likewise for ``Stream.wait_event``, which FSDP2 uses. Events are read once completed, without synchronization.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from trainwright.core.run.spans import Spans

# Maximum number of unread spans; the oldest are dropped.
_MOST_SPANS = 1 << 14


class StreamSpans(Spans):
    """Total time by kind, measured by events of a CUDA stream. Time in which the stream is idle counts too.

    Args:
        device: whose current stream is used.
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
    """Time that this rank waits for others, until it is stopped.

    Only waits of the creating thread and of its backward threads count, not those of checkpointing threads. On CUDA,
    only waits of the stream that is current at creation.

    Args:
        device: of this rank.

    Attributes:
        spans: waits by kind.
        kind: of waits that end now.
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
        """Return new spans of the same device, for other measurements."""
        return make_spans(self._device)

    def refresh(self) -> None:
        """Re-examine the step; to be called occasionally, between two steps."""

    def stop(self) -> None:
        """Stop measuring; idempotent."""
        _Interception.remove(self)

    def applies(self) -> bool:
        """Return whether a wait that begins now counts."""
        if self._stream is None:
            return threading.get_ident() == self._thread
        is_ours = threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1
        return is_ours and torch.cuda.current_stream(self._device) == self._stream

    def end(self, begin: Any) -> None:
        """Count a wait that began at a mark of :attr:`spans`."""
        self.spans.add(self.kind, begin, self.spans.mark())


class ReducerWaits(Waits):
    """Waits that include those of ``DistributedDataParallel``: the time of backward after this rank's last gradient.

    The last gradient is determined by hooking all gradients in the first backward pass, and in the first after
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
        """Determine the last gradient again."""
        self._listen(self._parameters)

    def stop(self) -> None:
        """Stop measuring; idempotent."""
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
        # Queued after the reducer's own callback, which waits.
        Variable._execution_engine.queue_callback(self._on_end)

    def _on_end(self) -> None:
        self.end(self._begin)
        self._begin = None
        if len(self._handles) > 1 and self._last is not None:
            self._listen([self._last])


class _Interception:
    """Patches of the waiting functions while waits are measured."""

    active: tuple[Waits, ...] = ()
    original: dict[tuple[Any, str], Any] = {}  # noqa: RUF012 - (class, name) -> patched function, per process

    @classmethod
    def add(cls, waits: Waits, with_streams: bool) -> None:
        cls.active = (*cls.active, waits)
        cls._patch(dist.Work, "wait")
        if with_streams:
            cls._patch(torch.cuda.Stream, "wait_event")

    @classmethod
    def remove(cls, waits: Waits) -> None:
        cls.active = tuple(each for each in cls.active if each is not waits)
        if not cls.active:
            for (kind, name), function in cls.original.items():
                setattr(kind, name, function)
            cls.original.clear()

    @classmethod
    def _patch(cls, kind: Any, name: str) -> None:
        if (kind, name) in cls.original:
            return
        original = cls.original[kind, name] = getattr(kind, name)

        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            begun = [(each, each.spans.mark()) for each in cls.active if each.applies()]
            try:
                return original(self, *args, **kwargs)
            finally:
                for each, begin in begun:
                    each.end(begin)

        setattr(kind, name, wait)


def make_spans(device: torch.device) -> Spans:
    """Return spans measured by the clock of a device."""
    return StreamSpans(device) if device.type == "cuda" else Spans()
