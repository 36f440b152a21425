"""Measured speed of a device: arithmetic, memory bandwidth, and copies from and to the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.device_profiles import machine_name
from trainwright.core.processes.machine import machine_facts, use_threads
from trainwright.core.torch_internals import TorchDispatchMode
from trainwright.strategies.contract.communication.probe import now_on

_TENSOR_FLOAT = "tf32"
_KINDS = {"float32": torch.float32, _TENSOR_FLOAT: torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Matrices grow until one product takes this many seconds, or they have the most rows.
_LONG_ENOUGH = 0.02
_FEWEST_ROWS, _MOST_ROWS = 256, 8192
# Seconds of repetitions; the fastest counts.
_BUDGET = 0.5
_COPIED = {"cpu": 128 * 2**20, "cuda": 2**30}
# Blocks whose training step is timed: width, rows of a batch, dtype.
_BLOCKS = {"cpu": (512, 512, "float32"), "cuda": (4096, 8192, "bfloat16")}
_NUM_BLOCKS = 2
# Blocks whose operations are too small to cost arithmetic.
_SMALL_DIM, _SMALL_BLOCKS = 4, 8


def measure_device(device: torch.device, local_size: int) -> dict[str, Any]:
    """Return the figures of one device in the units of the group ``device``: FLOP/s, bytes/s, bytes.

    Args:
        device: CPU (with torch's threads of this process) or GPU.
        local_size: ranks on this machine, which share its memory.

    Returns:
        ``device_name``, ``memory_bytes``, ``flops`` by dtype, ``memory_bandwidth``, ``efficiency``,
        ``host_bandwidth``, ``host_memory_bytes``, ``host_latency`` (seconds of the smallest copy between host and
        device), ``operation_seconds``, ``measured_on`` and the ``cores`` of the machine.
    """
    facts = machine_facts()
    host_memory = min(facts.memory, facts.memory_limit or facts.memory) // local_size
    on_gpu = device.type == "cuda"
    about = torch.cuda.get_device_properties(device) if on_gpu else None
    flops = {kind: _flops(device, kind) for kind in _KINDS if on_gpu or kind != _TENSOR_FLOAT}
    flops.setdefault(_TENSOR_FLOAT, flops["float32"])  # CPUs have no TF32
    host, host_latency = _host_copies(device)
    return {
        "device_name": about.name if about else f"CPU, {torch.get_num_threads()} threads",
        "memory_bytes": about.total_memory if about else host_memory,
        "flops": flops,
        "memory_bandwidth": _memory_bandwidth(device),
        "efficiency": _efficiency(device, flops),
        "host_bandwidth": host,
        "host_memory_bytes": host_memory,
        "host_latency": host_latency,
        "operation_seconds": _operation_seconds(device),
        "measured_on": machine_name(on_gpu),
        "cores": facts.cores,
    }


def _flops(device: torch.device, kind: str) -> float:
    """Return the FLOP/s of square matrix products; a multiply-add counts as two."""
    dtype, previous = _KINDS[kind], torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kind == _TENSOR_FLOAT
    try:
        rows = _FEWEST_ROWS
        while rows < _MOST_ROWS and _product(rows, dtype, device, 0.0) < _LONG_ENOUGH:
            rows *= 2
        return 2 * rows**3 / _product(rows, dtype, device, _BUDGET)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = previous


def _product(rows: int, dtype: torch.dtype, device: torch.device, budget: float) -> float:
    """Return the seconds of a square matrix product."""
    a, b = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    return _quickest(lambda: a @ b, device, budget)


def _quickest(function: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Return the seconds of the fastest of at least three calls after a warm-up, within a budget of seconds."""
    function()
    best, end = float("inf"), now_on(device) + budget
    for number in range(1000):
        begin = now_on(device)
        if number >= 3 and begin > end:
            break
        function()
        best = min(best, now_on(device) - begin)
    return best


def _memory_bandwidth(device: torch.device) -> float:
    """Return the bytes/s read and written by copies within the device's memory."""
    size = _COPIED[device.type]
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * size / _quickest(lambda: target.copy_(source), device, _BUDGET)


def _host_copies(device: torch.device) -> tuple[float, float]:
    """Return bytes/s from host to device, and the seconds of the smallest copy."""
    size, on_gpu = _COPIED["cpu"], device.type == "cuda"
    source = torch.ones(size // 4, pin_memory=on_gpu)
    target = torch.zeros(size // 4, device=device)
    large = _quickest(lambda: target.copy_(source, non_blocking=on_gpu), device, _BUDGET)
    small = _quickest(lambda: target[:1].copy_(source[:1], non_blocking=on_gpu), device, 0.0)
    return size / large, small


class _Block(nn.Module):
    """Feed-forward block of a transformer, most of its arithmetic."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to ``x``, (rows, dim)."""
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def _efficiency(device: torch.device, flops: dict[str, float]) -> float:
    """Return the part of peak FLOP/s that forward and backward of some blocks reach."""
    dim, rows, kind = _BLOCKS[device.type]
    blocks = nn.Sequential(*(_Block(dim) for _ in range(_NUM_BLOCKS))).to(device, _KINDS[kind])
    batch = torch.randn(rows, dim, device=device).to(_KINDS[kind]).requires_grad_()

    def step() -> None:
        blocks.zero_grad()
        blocks(batch).square().mean().backward()

    with torch.enable_grad():
        taken = _quickest(step, device, _BUDGET)
    matrices = _NUM_BLOCKS * 8 * dim * dim
    return min(1.0, 6 * matrices * rows / taken / flops[kind])


class _OperationCounter(TorchDispatchMode):
    """Counter of torch operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _operation_seconds(device: torch.device) -> float:
    """Return the seconds per operation in forward and backward of blocks too small to cost arithmetic.

    Counted like the planner does; includes the overhead of Python and autograd.
    """
    blocks = small_blocks(device)
    with torch.enable_grad():
        small_step(blocks, device)
        calls = _OperationCounter()
        with calls:
            small_step(blocks, device)
        taken = _quickest(lambda: small_step(blocks, device), device, _BUDGET)
    return taken / max(calls.count, 1)


def small_blocks(device: torch.device) -> nn.Sequential:
    """Return blocks too small to cost arithmetic."""
    return nn.Sequential(*(_Block(_SMALL_DIM) for _ in range(_SMALL_BLOCKS))).to(device)


def small_step(blocks: nn.Module, device: torch.device) -> None:
    """Run forward and backward of small blocks."""
    blocks(torch.ones(1, _SMALL_DIM, device=device)).square().mean().backward()


def threads_from_environment() -> None:
    """Apply ``OMP_NUM_THREADS`` to torch, which was imported before the launching process set it."""
    if "OMP_NUM_THREADS" in os.environ:
        use_threads(int(os.environ["OMP_NUM_THREADS"]))
