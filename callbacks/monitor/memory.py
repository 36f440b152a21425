"""What a rank holds in memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.monitor.records import tell
from trainwright.callbacks.steps import log_metrics
from trainwright.callbacks.windows import Windowed

_PROC = Path("/proc/self/statm")


class Memory(Windowed):
    """Log the bytes that a rank holds, at the end of each window of optimizer steps.

    Told as a record ``memory`` of every rank and logged as ``memory/<name>`` of rank 0: ``host`` (resident memory of
    the process) and ``host_peak``; on CUDA ``allocated``, ``reserved`` and ``peak`` (the most that was allocated in the
    window); with a strategy of this project ``parameters``, ``gradients`` and ``optimizer``, what the rank holds of
    them. Nothing is communicated, and the device is not waited for.

    The peak of the window is had by beginning to look for it anew (``torch.cuda.reset_peak_memory_stats``), which other
    code that reads the peak of a whole run sees.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (there, 0 is off).

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    # Only sizes are read.
    looks_at_parameters = False

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.latest: dict[str, int] = {}
        """What was logged last, bytes; empty before the first window has ended."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """At the end of a window, look."""
        step = self._ended(trainer)
        if step is None:
            return
        self.latest = _held(trainer)
        tell(trainer, "memory", self.latest, step + 1)
        log_metrics(trainer, {f"memory/{name}": float(value) for name, value in self.latest.items()}, step)


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
        found |= {
            "allocated": torch.mps.current_allocated_memory(),
            "reserved": torch.mps.driver_allocated_memory(),
        }
    measures = getattr(trainer.strategy, "measures", None)
    if measures is not None:
        held = measures.held_bytes()
        found |= {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer}
    return found


def host_bytes() -> int:
    """Resident memory of this process, bytes; where the system does not tell, the most it ever was."""
    try:
        import resource

        pages = int(_PROC.read_text().split()[1])
        return pages * resource.getpagesize()
    except (ImportError, OSError, ValueError, IndexError):
        return host_peak_bytes()


def host_peak_bytes() -> int:
    """The most resident memory that this process ever had, bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
