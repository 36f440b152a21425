"""Ranks that share one device, so that every layout trains on a machine with a single GPU.

NCCL refuses two ranks of a GPU. Here gloo carries their tensors, and as under NCCL a group names itself ``nccl`` and
takes no tensors of the CPU, unless it was made with ``backend="gloo"``: code that would fail there fails here. As a
plugin it has all cases of the rank pool run so:

    SHARED_DEVICE=cuda python -m pytest -p tests.shared_device tests/parity/test_strategies.py

``SHARED_DEVICE=simulated`` does the same without a GPU, on :mod:`tests.simulated_device`: it finds tensors left on the
CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator
from torch import Tensor

from tests import simulated_device
from tests.parity.harness import QUIET
from tests.pool import RankPool
from trainwright.strategies.contract.communication.calls import listen

_get_backend = dist.get_backend


def join(device: str) -> None:
    """Make the default process group of ranks that share ``device``, from the variables of torchrun."""
    if device != "cpu":
        _act_as_nccl(device)
    if device == simulated_device.NAME:
        dist.init_process_group(_backends(device))
        return
    for name, staged in {"isend": _isend, "irecv": _irecv, "send": _send, "recv": _recv}.items():
        setattr(c10d, name, staged)
        setattr(dist, name, staged)
    dist.init_process_group(_backends(device))


def _backends(device: str) -> str:
    # Collectives of the simulated device are those of the CPU.
    return f"cpu:gloo,{device}:gloo" if device == simulated_device.NAME else f"{device}:gloo"


def accelerator(device: str) -> Accelerator | str:
    """Return an accelerator that gives every rank the same ``device``."""
    kinds = {"cuda": _SharedGpu, simulated_device.NAME: _Simulated}
    return kinds[device]() if device in kinds else device


class _SharedGpu(CUDAAccelerator):
    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", 0)] * len(devices)


class _Simulated(_SharedGpu):
    def setup_device(self, device: torch.device) -> None: ...
    def setup(self, trainer: Any) -> None: ...
    def teardown(self) -> None: ...

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(simulated_device.NAME, 0)] * len(devices)


@cache
def _act_as_nccl(device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        simulated_device.load()
    c10d.get_backend = dist.get_backend = _backend  # type: ignore[assignment]
    objects_on, tensors_on = c10d._get_object_coll_device, c10d._get_pg_default_device
    c10d._get_object_coll_device = lambda group=None: device if _is_nccl(group) else objects_on(group)
    c10d._get_pg_default_device = lambda group=None: torch.device(device) if _is_nccl(group) else tensors_on(group)
    listen(lambda call: call.kind == "barrier" or _check(call.group, call.device))


def _backend(group: dist.ProcessGroup | None = None) -> str:
    return "nccl" if _is_nccl(group) else str(_get_backend(group))


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    return str(_get_backend(group)) in ("cuda:gloo", _backends(simulated_device.NAME))


def _check(group: dist.ProcessGroup | None, device: str) -> None:
    if device == "cpu" and _is_nccl(group):
        raise RuntimeError("No backend type associated with device type cpu")


def pytest_configure() -> None:
    """Let cases of the rank pool share the device that the variable names."""
    device, run = os.environ["SHARED_DEVICE"], RankPool.run
    if device == simulated_device.NAME:
        simulated_device.compiled()

    def shared(self: RankPool, function: Any, world_size: int, *args: Any, init_group: bool = True, **kw: Any) -> Any:
        case = (device if init_group else None, function.__module__, function.__qualname__)
        return run(self, on_device, world_size, device, case, *args, init_group=False, **kw)

    RankPool.run = shared  # type: ignore[method-assign]


def on_device(device: str, case: tuple[str | None, str, str], *args: Any, **kwargs: Any) -> Any:
    """Call the function of a case in a rank of the pool."""
    group, module, name = case
    if device == simulated_device.NAME:
        simulated_device.load()
    if group is not None:
        join(group)
    QUIET["accelerator"] = accelerator(device)
    torch.backends.cudnn.allow_tf32 = False
    return getattr(import_module(module), name)(*args, **kwargs)


# Sends of gloo know only the memory of the CPU.


class _Arriving:
    """What ``irecv`` returns: a wait fills the tensor."""

    def __init__(self, work: Any, staged: Tensor, target: Tensor) -> None:
        self._work, self._staged, self._target = work, staged, target

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        self._target.copy_(self._staged)
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def _isend(
    tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
) -> Any:
    return _start("send", _checked(tensor.detach(), group).cpu().contiguous().clone(), dst, group_dst, group, tag)


def _irecv(
    tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
) -> Any:
    staged = torch.empty_like(_checked(tensor.detach(), group), device="cpu", memory_format=torch.contiguous_format)
    return _Arriving(_start("recv", staged, src, group_src, group, tag), staged, tensor.detach())


def _send(*args: Any, **kwargs: Any) -> None:
    _isend(*args, **kwargs).wait()


def _recv(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    _irecv(tensor, *args, **kwargs).wait()


def _checked(tensor: Tensor, group: Any) -> Tensor:
    _check(group, tensor.device.type)
    return tensor


def _start(operation: str, staged: Tensor, peer: int | None, group_peer: int | None, group: Any, tag: int) -> Any:
    group = group or dist.group.WORLD
    if group_peer is None:
        assert peer is not None
        group_peer = dist.get_group_rank(group, peer)
    device = torch.device("cuda" if _is_nccl(group) else "cpu")
    start: Callable[..., Any] = getattr(group._get_backend(device), operation)
    return start([staged], group_peer, tag)
