"""Measured peak memory of a rank while a micro-batch size is tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.callbacks.monitor.memory import host_peak_bytes
from trainwright.core.failures.records import write_whole


class PeakRecorder(Callback):
    """At the end of training, write the peak memory of this rank in bytes to `rank_<n>.json`.

    `host`: of the process, without shared mappings (code of libraries). On CUDA also `device`: peak of allocated
    tensors, `device_there`: memory available to tensors after contexts, communicators and other processes, and
    `retries`: how often torch freed cached memory to allocate. Elsewhere 0.

    Args:
        folder: shared by all ranks.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        found = {"host": host_peak(), "device": 0, "device_there": 0, "retries": 0, **_on(trainer.strategy.root_device)}
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / f"rank_{trainer.global_rank}.json", json.dumps(found))


def host_peak() -> int:
    """Return the peak private memory of this process in bytes, without mapped files where the system reports them."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return host_peak_bytes()
    sizes = {
        name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    return max(sizes["VmHWM"] - sizes.get("RssFile", 0), 0)


def _on(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    free, _ = torch.cuda.mem_get_info(device)
    return {
        "device": torch.cuda.max_memory_allocated(device),
        "device_there": free + torch.cuda.memory_reserved(device),
        "retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }
