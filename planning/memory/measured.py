"""What a rank writes down while a micro-batch is tried: the most memory that it held."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.core.failures.records import write_whole


class PeakRecorder(Callback):
    """At the end of training, write the most that this rank held, in bytes, to `rank_<n>.json`.

    `host`: of the process, without what processes share (the code of libraries). On CUDA also `device`: what tensors
    took at most, and `device_there`: what they could have taken, beside the contexts and communicators of this process
    and what others hold; and `retries`: how often torch had to give back cached memory to go on. Elsewhere 0.

    Args:
        folder: that all ranks write into.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write."""
        found = {"host": host_peak(), "device": 0, "device_there": 0, "retries": 0, **_on(trainer.strategy.root_device)}
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / f"rank_{trainer.global_rank}.json", json.dumps(found))


def host_peak() -> int:
    """Bytes of memory that this process held at most and for itself: without mapped files, as far as can be told."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
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
