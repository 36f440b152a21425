"""Collectives that go on while training does, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch


class Background:
    """Does what it is given in a thread of its own, in the order given, so that ranks meet in the same order.

    A collective whose peer is gone must not keep the process: see :meth:`close`.

    Args:
        device: on CUDA, whose stream of its own the work is put on; it begins after what was queued when it was given.
        name: of the thread.
    """

    def __init__(self, device: torch.device, name: str = "trainwright-outer-gradient") -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Do ``work`` later; the future is done when it is (on CUDA: when its kernels are)."""
        future: Future[None] = Future()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._queue.put((work, future))
        return future

    def close(self, seconds: float = 5.0) -> None:
        """Take nothing more, and wait for what was taken, no longer than ``seconds``: a peer may be gone."""
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
            del item, work, future  # an idle thread must not keep process groups and buffers
