"""Faults of a process: it dies, stops, hangs, raises, or runs out of memory."""

from __future__ import annotations

import ctypes
import os
import signal as signals
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.inject.fault import Fault, StepFault
from trainwright.callbacks.inject.rules import STEP
from trainwright.core.run.phases import DATA
from trainwright.core.torch_internals import tree_leaves

# More than any platform's pthread_mutex_t takes.
_MUTEX_BYTES = 256
# Far more than any device has, and little enough that it is the allocator who refuses.
_TOO_MANY_BYTES = 1 << 50


class Kill(Fault):
    """See :func:`trainwright.callbacks.inject.kill`."""

    def __init__(self, rank: int | None, at_step: int, signal: int, times: int | None) -> None:
        super().__init__(rank, at_step, times)
        self.signal = signal

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Send this process the signal."""
        os.kill(os.getpid(), self.signal)


class Stop(Fault):
    """See :func:`trainwright.callbacks.inject.stop`."""

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop this process, all of its threads."""
        os.kill(os.getpid(), signals.SIGSTOP)


class Exit(Fault):
    """See :func:`trainwright.callbacks.inject.exit`."""

    def __init__(self, rank: int | None, at_step: int, code: int, times: int | None) -> None:
        super().__init__(rank, at_step, times)
        self.code = code

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the interpreter."""
        sys.exit(self.code)


class OutOfMemory(StepFault):
    """See :func:`trainwright.callbacks.inject.out_of_memory`."""

    def around(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Allocate in vain, on the device of the batch."""
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        torch.empty(_TOO_MANY_BYTES, dtype=torch.uint8, device=device)
        raise AssertionError(f"{_TOO_MANY_BYTES} bytes could be allocated")


class RaiseIn(Fault):
    """See :func:`trainwright.callbacks.inject.raise_in`; :func:`raise_in` overrides the hook that is named."""

    def __init__(self, hook: str, rank: int | None, at_step: int, error: Exception | None, times: int | None) -> None:
        super().__init__(rank, at_step, times)
        self.hook = hook
        self.error = error

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep in mind which step runs."""
        self.reach(trainer)

    def raise_if_due(self, trainer: Trainer) -> None:
        """Raise, if the hook is called in the step that is meant."""
        if self.is_due(trainer):
            self.fire(trainer)
            raise self.error or RuntimeError(f"injected in {self.hook}")


class RaiseInStep(RaiseIn, StepFault):
    """The same in the module's own step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Take the step's place, if it is due."""
        self.reach(trainer)
        if self.is_due(trainer):
            self.fire(trainer)
            self.surround(pl_module)

    def around(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raise."""
        raise self.error or RuntimeError(f"injected in {self.hook}")


def raise_in(hook: str, rank: int | None, at_step: int, error: Exception | None, times: int | None) -> RaiseIn:
    """A callback that overrides just the hook that is named: every other one would cost time and run for nothing."""
    if hook == STEP:
        return RaiseInStep(hook, rank, at_step, error, times)
    usual = getattr(RaiseIn, hook)

    def raise_or_go_on(self: RaiseIn, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        usual(self, trainer, *args, **kwargs)
        self.raise_if_due(trainer)

    kind: type[RaiseIn] = type(RaiseIn.__name__, (RaiseIn,), {hook: raise_or_go_on})
    return kind(hook, rank, at_step, error, times)


class Hang(StepFault):
    """See :func:`trainwright.callbacks.inject.hang`."""

    def __init__(self, rank: int | None, at_step: int, how: str, times: int | None) -> None:
        super().__init__(rank, at_step, times)
        self.how = how
        self._alone: dist.ProcessGroup | None = None
        self._end_listening: Callable[[], None] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare what hangs: for ``skip_collective`` a process group, whose making is a collective of all ranks."""
        super().on_train_start(trainer, pl_module)
        if self.how == "skip_collective":
            if trainer.world_size == 1:
                raise ValueError(f"{self.sentence}: there is one rank, which has nobody to wait for; use how='sleep'.")
            self._alone = dist.new_group()
        if self.how == "data":
            phases: Any = getattr(trainer, "phases", None)
            if phases is None:
                raise ValueError(f"{self.sentence} needs trainwright.Trainer, which tells when it waits for data.")
            self._end_listening = phases.listen(partial(self._hear, trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Hang in this step, if it is due and data is not the place."""
        if self.how != "data":
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def around(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hang."""
        _HANGS[self.how](self._alone)
        raise AssertionError(f"{self.sentence} has come to an end")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop listening."""
        super().on_exception(trainer, pl_module, exception)
        self._stop_listening()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop listening."""
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._end_listening is not None:
            self._end_listening()
            self._end_listening = None

    def _hear(self, trainer: Trainer, phase: str) -> None:
        if phase != DATA:
            return
        self.reach(trainer)
        if self.is_due(trainer):
            self.fire(trainer)
            _sleep()


def _sleep(*_: Any) -> None:
    while True:
        time.sleep(3600)


def _lock(*_: Any) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _hold_gil(*_: Any) -> None:
    """Wait in native code for a lock that is taken, without letting other threads of Python run.

    A lock of the C library, since sleeping there ends early when a signal arrives.
    """
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the global lock during a call
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _enter_alone(group: dist.ProcessGroup | None) -> None:
    dist.barrier(group)
    _sleep()  # the collective has timed out, and been left


_HANGS: dict[str, Callable[[dist.ProcessGroup | None], None]] = {
    "sleep": _sleep,
    "lock": _lock,
    "gil": _hold_gil,
    "skip_collective": _enter_alone,
}
