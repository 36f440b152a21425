"""Environment in which a `training_step` runs without memory, other ranks or a Trainer.

Uses torch's fake tensors, which have shapes but no memory, and torch's fake process group.
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
    """The module or its batch cannot be run without a Trainer and without memory; the message has the reason."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's logs about fake tensors, and warnings and output of the user's step."""
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
    """Provide a fake default process group, of which this process is rank 0.

    Args:
        ranks: world size.

    Raises:
        FactsError: if a process group exists already.
    """
    if dist.is_initialized():
        raise FactsError("a process group is initialized already; plan in the launching process, before ranks start")
    from trainwright.core.torch_internals import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_mesh_caches()


def autocast_of(precision: str) -> Any:
    """Return the autocast context of a precision."""
    if precision in ("bf16-mixed", "16-mixed"):
        dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
        return torch.autocast("cpu", dtype, cache_enabled=False)  # like the strategies' plugin
    return contextlib.nullcontext()


def without_trainer(module: LightningModule) -> None:
    """Make `log` and `log_dict` of a module no-ops, which need no Trainer."""
    module.__dict__["log"] = module.__dict__["log_dict"] = lambda *args, **kwargs: None


def loss_of(output: Any) -> Tensor:
    """Return the loss in the output of a `training_step`.

    Raises:
        TypeError: if there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TypeError(f"training_step returned {type(output).__name__}, not a loss or a dict with 'loss'")
    return loss


def give_storage(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Replace meta tensors of a module by fake CPU tensors, keeping ties. Only within a fake mode.

    Args:
        module: on the meta device.
        dtype: of floating-point tensors; ``None``: unchanged.
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
