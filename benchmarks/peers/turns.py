"""Measurement from within a peer: each rank reports the cost of a piece, then waits for its next turn.

A waiting rank blocks on a socket and uses no CPU. Reported are the time at which the first step ended (on the machine's
monotonic clock, which all processes share), and of each piece seconds on the clock, CPU seconds of the process, bytes
that it gave to the kernel, the most memory that it ever held, and the loss of every step.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.task import TASK

SOCKET = "TRAINWRIGHT_BENCHMARK_PEERS_SOCKET"
"""Environment variable: path of the Unix socket on which turns are given."""


class Turns:
    """Call :meth:`step` at the end of each optimizer step. Without :data:`SOCKET` it does nothing."""

    def __init__(self) -> None:
        self._steps = 0
        self._next = 0
        self._losses: list[Tensor] = []
        self._socket: socket.socket | None = None
        if SOCKET in os.environ:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(os.environ[SOCKET])
        self._begin = _now()

    def step(self, loss: Tensor | None) -> None:
        """One optimizer step has ended.

        Args:
            loss: of this rank's samples; ``None``: another rank has it.
        """
        if self._socket is None:
            return
        self._steps += 1
        if loss is not None:
            self._losses.append(loss.detach())
        if self._steps == TASK.boundaries[self._next]:
            self._tell()

    def _tell(self) -> None:
        assert self._socket is not None
        if TASK.device == "cuda":
            torch.cuda.synchronize()
        now = _now()
        report = {name: now[name] - self._begin[name] for name in now}
        report |= {
            "rank": dist.get_rank() if dist.is_initialized() else 0,
            "moment": time.monotonic(),
            "peak": peak_bytes(),
            "losses": [float(loss) for loss in self._losses],
        }
        self._losses = []
        self._next += 1
        self._socket.sendall(json.dumps(report).encode() + b"\n")
        if self._next < len(TASK.boundaries):
            if not self._socket.recv(1):
                raise SystemExit("The benchmark has ended.")
            self._begin = _now()


def _now() -> dict[str, Any]:
    return {"wall": time.perf_counter(), "cpu": time.process_time(), "written": written_bytes()}


def written_bytes() -> int:
    """Bytes given to ``write`` and its kin by all threads of this process since it began: sockets, files, terminals."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def peak_bytes() -> int:
    """Most memory so far: of the device's tensors under CUDA, else resident memory of the process."""
    if TASK.device == "cuda":
        return torch.cuda.max_memory_allocated()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
