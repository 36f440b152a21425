"""Numerical faults (NaN, loss spikes, flipped bits), and slow ranks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainwright.callbacks.inject.fault import Fault, StepFault

# Backward costs about two forward passes: gradients of inputs and of weights.
_STEP_OF_FORWARD = 3
# Names shown in a message.
_SHOWN = 8


class Spike(StepFault):
    """See :func:`trainwright.callbacks.inject.spike`."""

    factor: float
    _done = False

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the step."""
        self._done = False
        super().strike(trainer, pl_module)

    def around(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiply the loss."""
        output = step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            return output
        self._done = True
        changed = loss * self.factor
        return {**output, "loss": changed} if isinstance(output, dict) else changed

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Restore the module's step.

        Raises:
            RuntimeError: if this rank had no loss to change.
        """
        was_due = self._struck and not self._done
        super().on_train_batch_end(trainer, pl_module, *_)
        if was_due:
            raise RuntimeError(f"{self.sentence} changed nothing: rank {trainer.global_rank} {self._reason()}")

    def _reason(self) -> str:
        """Return why nothing was changed, and what to type instead."""
        return "has no loss (training_step returns none, or its pipeline stage is not the last). Name another rank."


class _OfParameter(Fault):
    """A fault of one parameter."""

    parameter: str | None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise before the first step if this rank does not have the parameter."""
        super().on_train_start(trainer, pl_module)
        names = [name for name, _ in pl_module.named_parameters(remove_duplicate=False)]
        if self.parameter is not None and self.strikes(trainer) and self.parameter not in names:
            shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            raise ValueError(
                f"{self.sentence}: there is no parameter {self.parameter!r} on this rank; there are {shown}."
            )


class NaN(_OfParameter, Spike):
    """See :func:`trainwright.callbacks.inject.nan`."""

    factor = math.nan
    where: str
    _is_chosen = False  # whether a gradient has been picked

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._handles: list[RemovableHandle] = []

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the step, or hook the module that uses the parameter: only then a strategy has gathered it."""
        if self.where == "loss":
            super().strike(trainer, pl_module)
            return
        self._done = self._is_chosen = False
        for module, name in _owners(pl_module, self.parameter):
            self._handles.append(module.register_forward_pre_hook(partial(self._poison, name)))

    def release(self, pl_module: LightningModule) -> None:
        """Remove all hooks as well."""
        super().release(pl_module)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _reason(self) -> str:
        if self.where == "loss":
            return super()._reason()
        return (
            f"computed no gradient of {self.parameter or 'the first parameter that it used'}, because it is frozen, "
            "was not used, or the loss does not depend on it. Name another parameter, or another rank."
        )

    def _poison(self, name: str, module: nn.Module, inputs: Any) -> None:
        parameter = getattr(module, name)
        if self._is_chosen or not parameter.requires_grad:
            return
        self._is_chosen = True
        self._handles.append(parameter.register_hook(self._with_nan))

    def _with_nan(self, gradient: Tensor) -> Tensor:
        """Return ``gradient`` with one NaN element."""
        self._done = True
        poisoned = gradient.clone()
        poisoned[(0,) * poisoned.dim()] = math.nan
        return poisoned


class FlipBit(_OfParameter):
    """See :func:`trainwright.callbacks.inject.flip_bit`."""

    bit: int | None

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Flip the bit.

        Raises:
            RuntimeError: if this rank holds no part of the parameter.
        """
        parameters = pl_module.named_parameters(remove_duplicate=False)  # tied ones by any of their names
        local = {name: getattr(parameter, "_local_tensor", parameter).detach() for name, parameter in parameters}
        held = {name: t for name, t in local.items() if t.numel() and not t.is_meta and t.is_floating_point()}
        name = self.parameter or next(iter(held), "")
        if name not in held:
            raise RuntimeError(
                f"{self.sentence}: rank {trainer.global_rank} holds nothing of {name or 'any parameter'}. Name a "
                "parameter that it holds, or another rank."
            )
        flip_bit(held[name], self.bit)


class Slow(StepFault):
    """See :func:`trainwright.callbacks.inject.slow`."""

    factor: float
    to_step: int | None
    _since: float | None  # processor time of this thread at the last micro-batch

    def __init__(self, rank: int | None, from_step: int, **options: Any) -> None:
        super().__init__(rank, from_step, None, **options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset."""
        super().on_train_start(trainer, pl_module)
        self._device, self._since, self._is_slow = trainer.strategy.root_device, None, False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Slow down in the given range of steps."""
        self.reach(trainer)
        in_range = self.at_step <= self.step and (self.to_step is None or self.step < self.to_step)
        was_slow, self._is_slow = self._is_slow, in_range and self.strikes(trainer)
        if self._is_slow:
            self.surround(pl_module)
            if not was_slow:
                self.say(trainer)
        else:
            self.release(pl_module)
            self._since = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Stay wrapped for the next batch."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the module's step."""
        self.release(pl_module)

    def around(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step, and sleep."""
        if self._device.type == "cuda":
            return self._around_on_device(step, args, kwargs)
        now = time.thread_time()
        if self._since is not None:
            time.sleep((self.factor - 1) * (now - self._since))
        self._since = time.thread_time()
        return step(*args, **kwargs)

    def _around_on_device(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.cuda.synchronize(self._device)
        begin = time.perf_counter()
        output = step(*args, **kwargs)
        torch.cuda.synchronize(self._device)
        time.sleep((self.factor - 1) * _STEP_OF_FORWARD * (time.perf_counter() - begin))
        return output


@torch.no_grad()
def flip_bit(tensor: Tensor, bit: int | None = None) -> None:
    """Flip one bit of the middle element, in place.

    Args:
        tensor: not empty, of floating-point numbers.
        bit: counted from the lowest; ``None``: the highest of the mantissa.

    Raises:
        ValueError: if ``bit`` is too large for the type.
    """
    width = 8 * tensor.element_size()
    if bit is None:
        bit = round(-math.log2(torch.finfo(tensor.dtype).eps)) - 1
    if bit >= width:
        raise ValueError(f"bit={bit} of a number of {width} bits, {tensor.dtype} (allowed: 0 to {width - 1})")
    number = tensor[tuple(size // 2 for size in tensor.shape)]  # a 0-d view
    octets = number.reshape(1).clone().view(torch.uint8)
    octet = bit // 8 if sys.byteorder == "little" else tensor.element_size() - 1 - bit // 8
    octets[octet] ^= 1 << bit % 8
    number.copy_(octets.view(tensor.dtype)[0])


def _owners(module: nn.Module, parameter: str | None) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that hold the parameter (or any, if ``None``) with its local name; a tied one has several."""
    for path, part in module.named_modules():
        for name in part._parameters:
            if parameter is None or parameter == (f"{path}.{name}" if path else name):
                yield part, name
