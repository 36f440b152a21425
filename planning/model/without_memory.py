"""Surroundings in which the `training_step` of a module runs without memory, without other ranks and without a Trainer.

Torch's fake tensors have shapes and no memory, and torch's fake backend stands for a process group of which nobody else
is there.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from trainwright.strategies.contract.groups import clear_mesh_caches


class FactsError(ValueError):
    """The module, or a batch of it, cannot be run without a Trainer and without memory; the message says why."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is said of what is tried: torch logs what fails without values, a user's step may warn and print."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """A default process group of so many ranks, of which this is the first and the others are not there.

    Args:
        ranks: of the group.

    Raises:
        FactsError: if the process has met real ranks already.
    """
    if dist.is_initialized():
        raise FactsError("this process has met other ranks already; plan before they meet, from the launching process")
    from trainwright.core.torch_internals import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_mesh_caches()


def fake_tensors() -> Any:
    """The mode in which new tensors have shapes and no memory; others may be computed with."""
    from trainwright.core.torch_internals import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def default_dtype(precision: str) -> Iterator[None]:
    """New tensors get the dtype that they get in a run of this precision."""
    if precision != "bf16-true":
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def autocast_of(precision: str) -> Any:
    """The context of a forward pass under a precision of the group of that name."""
    if precision in ("bf16-mixed", "16-mixed"):
        dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
        return torch.autocast("cpu", dtype, cache_enabled=False)  # as the strategies' plugin does
    return contextlib.nullcontext()


def without_trainer(module: LightningModule) -> None:
    """Let a step log without a Trainer: what it logs is dropped."""
    module.__dict__["log"] = module.__dict__["log_dict"] = _ignore


def _ignore(*args: Any, **kwargs: Any) -> None:
    """In place of ``log`` and ``log_dict``, which want a Trainer."""


def loss_of(output: Any) -> Tensor:
    """The loss in what a `training_step` has returned.

    Raises:
        TypeError: if there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TypeError(f"training_step returned {type(output).__name__}, and no loss")
    return loss


def give_storage(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Exchange meta tensors for such that say they are on the CPU, ties kept; within a fake mode.

    Args:
        module: on the meta device.
        dtype: that floating-point tensors get; ``None``: their own.
    """
    made: dict[int, Any] = {}

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        found: Tensor = made[id(tensor)]
        return found

    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    slots[name] = real(tensor)  # type: ignore[assignment]
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor) and value.is_meta:
                object.__setattr__(part, name, real(value))
