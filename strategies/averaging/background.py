"""Background thread for collectives that overlap with training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch

from trainwright.core.processes.machine import with_threads_of_caller


class Background:
    """Runs submitted work in order in a daemon thread, so that ranks issue collectives in the same order.

    Args:
        device: on CUDA, work runs on a side stream that waits for what was queued at submission.
        name: of the thread.
    """

    def __init__(self, device: torch.device, name: str = "trainwright-outer-gradient") -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=with_threads_of_caller(self._run), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Queue ``work``; the future completes when it is done (on CUDA: when its kernels are)."""
        future: Future[None] = Future()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._queue.put((work, future))
        return future

    def close(self, seconds: float = 5.0) -> None:
        """Stop after the queued work, waiting at most ``seconds``: a peer may be gone."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        while (item := self._queue.get()) is not None:
            work, future = item
            try:
                if self._stream is None:
                    work()
                else:
                    with torch.cuda.stream(self._stream):
                        work()
                    self._stream.synchronize()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del item, work, future  # an idle thread must not keep process groups and buffers alive
