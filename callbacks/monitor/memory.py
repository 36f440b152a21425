"""Memory held by a rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from trainwright.callbacks.monitor.records import publish
from trainwright.callbacks.windows import Windowed

_PROC = Path("/proc/self/statm")


class Memory(Windowed):
    """Log the bytes that a rank holds at the end of each window of optimizer steps.

    A ``memory`` record of every rank, logged as ``memory/<name>`` of rank 0: ``host`` (resident memory of the process)
    and ``host_peak``; on CUDA ``allocated``, ``reserved`` and ``peak`` (of the window); with a strategy of this project
    ``parameters``, ``gradients`` and ``optimizer``. No communication, no device synchronization.

    The peak is reset in each window (``torch.cuda.reset_peak_memory_stats``), which affects other code that reads it.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (where 0 is off).

    Attributes:
        latest: bytes logged last; empty before the end of the first window.

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.latest: dict[str, int] = {}

    def _report(self, trainer: Trainer, step: int) -> None:
        self.latest = _held(trainer)
        metrics = {f"memory/{name}": float(value) for name, value in self.latest.items()}
        publish(trainer, step, "memory", self.latest, metrics)


def _held(trainer: Any) -> dict[str, int]:
    found = {"host": host_bytes(), "host_peak": host_peak_bytes()}
    device = trainer.strategy.root_device
    if device.type == "cuda":
        found |= {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
        }
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "mps":
        found |= {"allocated": torch.mps.current_allocated_memory(), "reserved": torch.mps.driver_allocated_memory()}
    measures = getattr(trainer.strategy, "measures", None)
    if measures is not None:
        held = measures.held_bytes()
        found |= {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer}
    return found


def host_bytes() -> int:
    """Return the resident memory of this process in bytes; its peak if the system does not report it."""
    try:
        import resource

        pages = int(_PROC.read_text().split()[1])
        return pages * resource.getpagesize()
    except (ImportError, OSError, ValueError, IndexError):
        return host_peak_bytes()


def host_peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
