"""Process faults: kill, stop, hang, exception, out of memory."""

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
from trainwright.callbacks.windows import Listening
from trainwright.core.run.phases import DATA
from trainwright.core.torch_internals import tree_leaves

# At least the size of any platform's pthread_mutex_t.
_MUTEX_BYTES = 256
# More than any device has, but not so much that anything but the allocator refuses.
_TOO_MANY_BYTES = 1 << 50


class Kill(Fault):
    """See :func:`trainwright.callbacks.inject.kill`."""

    signal: int

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Send the signal."""
        os.kill(os.getpid(), self.signal)


class Stop(Kill):
    """See :func:`trainwright.callbacks.inject.stop`."""

    signal = signals.SIGSTOP


class Exit(Fault):
    """See :func:`trainwright.callbacks.inject.exit`."""

    code: int

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exit the interpreter."""
        sys.exit(self.code)


class OutOfMemory(StepFault):
    """See :func:`trainwright.callbacks.inject.out_of_memory`."""

    def around(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Allocate on the device of the batch."""
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        torch.empty(_TOO_MANY_BYTES, dtype=torch.uint8, device=device)
        raise AssertionError(f"{_TOO_MANY_BYTES} bytes could be allocated")


class RaiseIn(Fault):
    """See :func:`trainwright.callbacks.inject.raise_in`; :func:`raise_in` overrides the given hook."""

    hook: str
    error: Exception | None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Track the current step."""
        self.reach(trainer)

    def raise_if_due(self, trainer: Trainer) -> None:
        """Raise if due."""
        if self.is_due(trainer):
            self.fire(trainer)
            raise self.error or RuntimeError(f"injected in {self.hook}")


class RaiseInStep(RaiseIn, StepFault):
    """The same in the module's ``training_step``."""

    on_train_batch_start = StepFault.on_train_batch_start  # wraps the step if due

    def around(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raise."""
        raise self.error or RuntimeError(f"injected in {self.hook}")


def raise_in(hook: str, rank: int | None, at_step: int, error: Exception | None, times: int | None) -> RaiseIn:
    """Create a callback that overrides only the given hook, so that no other hook runs."""
    if hook == STEP:
        return RaiseInStep(rank, at_step, times, hook=hook, error=error)
    usual = getattr(RaiseIn, hook)

    def raise_or_continue(self: RaiseIn, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        usual(self, trainer, *args, **kwargs)
        self.raise_if_due(trainer)

    kind: type[RaiseIn] = type(RaiseIn.__name__, (RaiseIn,), {hook: raise_or_continue})
    return kind(rank, at_step, times, hook=hook, error=error)


class Hang(Listening, StepFault):
    """See :func:`trainwright.callbacks.inject.hang`."""

    how: str
    _group: dist.ProcessGroup | None = None  # that no other rank enters

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the process group for ``skip_collective`` (a collective), or listen to phases for ``data``."""
        super().on_train_start(trainer, pl_module)
        if self.how == "skip_collective":
            if trainer.world_size == 1:
                raise ValueError(f"{self.sentence}: there is only one rank, none to wait for; use how='sleep'.")
            self._group = dist.new_group()
        if self.how == "data":
            phases: Any = getattr(trainer, "phases", None)
            if phases is None:
                raise ValueError(f"{self.sentence} needs trainwright.Trainer, which reports when it waits for data.")
            self._end_listening = phases.listen(partial(self._hear, trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Hang in this step if due, unless in data loading."""
        if self.how != "data":
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def around(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hang."""
        _HANGS[self.how](self._group)
        raise AssertionError(f"{self.sentence} has ended")

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
    """Deadlock in native code while holding the GIL. A C mutex, since a sleep ends early on a signal."""
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the GIL during a call
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _enter_alone(group: dist.ProcessGroup | None) -> None:
    dist.barrier(group)
    _sleep()  # the collective has timed out


_HANGS: dict[str, Callable[[dist.ProcessGroup | None], None]] = {
    "sleep": _sleep,
    "lock": _lock,
    "gil": _hold_gil,
    "skip_collective": _enter_alone,
}
