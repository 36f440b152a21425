"""Lightning's precision plugins, made right for gradients that are split across ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.core.run.hooks import HookTable
from trainwright.strategies.contract.gradients import (
    GradientScope,
    clip_gradient_norm,
    clip_gradient_value,
    local_tensor,
)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What autocast computes matrix products in, by precision."""


class AgreedGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` whose decision to skip a step is the same on all ranks.

    With sharded gradients a rank sees only its own part, so an overflow elsewhere must be heard of: one all-reduce of
    a flag per step. Replicated gradients were averaged, carry the overflow themselves and need none.
    """

    # Set by a strategy under which ranks hold parts that are not DTensors.
    always_agrees = False
    # How ranks agree, from this rank's flag to that of all; None: by an all-reduce.
    agree: Callable[[Tensor], Tensor] | None = None
    # The scale never falls below this; 0: no limit.
    least_scale = 0.0
    # The scale never changes; a step with an overflow is dropped all the same.
    fixed = False

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's, within the limits that were asked for."""
        if self.fixed and new_scale is None:
            new_scale = float(self._init_scale)
        super().update(new_scale)
        scale = self._scale
        if self.least_scale and scale is not None:
            scale.clamp_(min=self.least_scale)

    def forget_unscaled(self) -> None:
        """No step follows on the gradients that were unscaled; torch would refuse to unscale those of the next one."""
        self._per_optimizer_states.clear()

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not self.always_agrees and not any(isinstance(p.grad, DTensor) for p in parameters):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # Offloaded gradients live on another device than the loss; the flag is kept where the gradients are.
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter in parameters:
            gradient = local_tensor(parameter.grad)
            if gradient.is_sparse:
                parameter.grad = gradient = gradient.coalesce()
                gradient = gradient._values()
            by_device.setdefault(gradient.device, []).append(gradient)
        flags = {}
        for device, gradients in by_device.items():
            flag = found_inf.to(device, copy=True)
            scale = inv_scale.to(device)
            for dtype in {g.dtype for g in gradients}:
                same = [g for g in gradients if g.dtype is dtype]
                torch._amp_foreach_non_finite_check_and_unscale_(same, flag, scale)
            flags[device] = flag
        agreed = torch.stack([found_inf, *(flag.to(found_inf.device) for flag in flags.values())]).max()
        if self.agree is None:
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        else:
            agreed = self.agree(agreed)
        return {device: agreed.to(device).reshape(()) for device in flags or (found_inf.device,)}


class GradientClipper(Protocol):
    """A strategy that clips by itself, because the gradients of a step are averaged elsewhere."""

    def clip_norm(self, optimizer: Optimizer, max_norm: float, error_if_nonfinite: bool) -> None:
        """Scale the gradients of the coming step so that their norm is at most ``max_norm``."""

    def clip_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clamp each element to ``[-limit, limit]``."""


class _GradientRules(Precision):
    """Clipping that sees all shards of the gradients."""

    # Given by a strategy whose gradients are not averaged here; None: those of the parameters are clipped.
    clipper: GradientClipper | None = None

    error_if_nonfinite = False
    # Given by a strategy whose gradients are spread over more than the meshes of their DTensors.
    scope: GradientScope | None = None
    # Given by a trainer that knows who listens to which hook; without it Lightning's own calls are made.
    hooks: HookTable | None = None
    # Called with the optimizer once its gradients are clipped, right before it changes anything.
    before_update: Callable[[Optimizer], None] | None = None

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Call ``on_before_backward``."""
        if self.hooks is None:
            return super().pre_backward(tensor, module)
        if "on_before_backward" in self.hooks.heard:
            self.hooks.call("on_before_backward", tensor)
        return tensor

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Call ``on_after_backward``."""
        if self.hooks is None:
            return super().post_backward(tensor, module)
        if "on_after_backward" in self.hooks.heard:
            self.hooks.call("on_after_backward")
        return tensor  # not detached, as Lightning's: backward has let go of the graph, and nobody keeps this

    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        if self.hooks is None:
            super()._after_closure(model, optimizer)
        else:
            if "on_before_optimizer_step" in self.hooks.heard:
                self.hooks.call("on_before_optimizer_step", optimizer)
            trainer = model.trainer
            if trainer.gradient_clip_val is not None or "configure_gradient_clipping" in self.hooks.heard:
                self._clip_gradients(model, optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        if self.before_update is not None:
            self.before_update(getattr(optimizer, "optimizer", optimizer))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp each element to ``[-clip_val, clip_val]``."""
        if self.clipper is not None:
            self.clipper.clip_value(optimizer, clip_val)
            return
        clip_gradient_value(self.main_params(optimizer), clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scale so that the norm over all shards is at most ``clip_val``."""
        if self.clipper is not None:
            self.clipper.clip_norm(optimizer, clip_val, self.error_if_nonfinite)
            return
        clip_gradient_norm(self.main_params(optimizer), clip_val, self.error_if_nonfinite, self.scope)


class FullPrecision(_GradientRules):
    """``precision="32"``: everything in single precision."""


class FullDoublePrecision(_GradientRules, DoublePrecision):
    """``precision="64"``: everything in double precision."""


class PureHalfPrecision(_GradientRules, HalfPrecision):
    """``precision="bf16-true"`` or ``"16-true"``: weights, gradients and optimizer state in half precision."""


class AutocastPrecision(_GradientRules, MixedPrecision):
    """``precision="bf16-mixed"`` or ``"16-mixed"``: single-precision state, autocast in the forward pass.

    ``"16-mixed"`` scales the loss dynamically; works on CPU too. A weight is cast at each use: autocast's cache would
    keep a half-precision copy of every weight until the forward pass ends, under checkpointing and ZeRO-3 too, where
    a block's are to be gone as soon as it has computed.
    """

    def __init__(self, precision: Any, device: str, scaler: torch.amp.GradScaler | None = None) -> None:
        if scaler is None and precision == "16-mixed":
            scaler = AgreedGradScaler(device=device)
        super().__init__(precision, device, scaler)

    def autocast_context_manager(self) -> torch.autocast:
        """Autocast to half precision that keeps no copies of weights."""
        return torch.autocast(self.device, dtype=AUTOCAST_DTYPES[self.precision], cache_enabled=False)

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss, then call ``on_before_backward``."""
        if self.hooks is not None and self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)


def set_loss_scale(plugin: Precision, initial: float, growth_interval: int, least: float, fixed: bool) -> None:
    """Have the loss scaled as asked for; see :class:`~trainwright.trainer.loop.loss_scale.LossScaling`.

    Raises:
        ValueError: if the plugin scales no loss, or is the user's own.
    """
    if not isinstance(plugin, AutocastPrecision) or plugin.scaler is None:
        raise ValueError(
            f"loss_scale is given, but {type(plugin).__name__} scales no loss: only precision='16-mixed' does. "
            "Use that precision, or leave loss_scale out."
        )
    scaler = AgreedGradScaler(device=plugin.device, init_scale=initial, growth_interval=growth_interval)
    scaler.least_scale, scaler.fixed = least, fixed
    plugin.scaler = scaler


def adapt_precision(plugin: Precision | None) -> Precision | None:
    """The plugin of this module for one of Lightning's own; any other plugin is returned as it is."""
    if type(plugin) is Precision:
        return FullPrecision()
    if type(plugin) is DoublePrecision:
        return FullDoublePrecision()
    if type(plugin) is HalfPrecision:
        return PureHalfPrecision(plugin.precision)
    if type(plugin) is MixedPrecision:
        return AutocastPrecision(plugin.precision, plugin.device, _agreed(plugin.scaler, plugin.device))
    return plugin


def named_dtype(name: str | None) -> torch.dtype | None:
    """What options call ``fp32``, ``bf16`` and ``fp16``; ``None`` stays ``None``."""
    return None if name is None else _DTYPES[name]


def autocast_dtype(plugin: Precision) -> torch.dtype | None:
    """What a plugin has matrix products computed in by autocast; ``None``: it is not known to use autocast."""
    return AUTOCAST_DTYPES[plugin.precision] if isinstance(plugin, AutocastPrecision) else None


def takes_before_update(plugin: Precision) -> bool:
    """Whether :func:`before_update` can be asked of it."""
    return isinstance(plugin, _GradientRules)


def before_update(plugin: Precision, function: Callable[[Optimizer], None] | None) -> None:
    """Have ``function`` called right before an optimizer changes anything; ``None``: nothing is called.

    Raises:
        ValueError: if the plugin is the user's own.
    """
    if isinstance(plugin, _GradientRules):
        plugin.before_update = function
    elif function is not None:
        raise ValueError(
            f"The precision plugin {type(plugin).__name__} does not tell when gradients are clipped, which "
            "compression=onebit must know. Use one of Lightning's (precision='bf16-mixed'), or compression=topk."
        )


def _agreed(scaler: torch.amp.GradScaler | None, device: str) -> torch.amp.GradScaler | None:
    if scaler is None or type(scaler) is not torch.amp.GradScaler:
        return scaler
    return AgreedGradScaler(
        device=device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )
