"""Lightning's precision plugins for gradients that are sharded across ranks."""

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
from trainwright.core.run.traits import traits_of
from trainwright.strategies.contract.gradients import (
    GradientScope,
    clip_gradient_norm,
    clip_gradient_value,
    local_tensor,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Autocast dtype of each mixed precision."""
# Device -> scale of the first steps, where not torch's; runs on CPUs are short, and the first steps would be dropped.
_INITIAL_SCALE = {"cpu": 2.0**10}


class AgreedGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` that skips a step on all ranks or on none.

    With sharded gradients, each step all-reduces an overflow flag. Replicated gradients carry the overflow of any rank
    after averaging and need no flag.
    """

    # Set by strategies whose ranks hold shards that are not DTensors.
    always_agrees = False
    # Reduces this rank's flag over all ranks; None: an all-reduce.
    agree: Callable[[Tensor], Tensor] | None = None
    # Lower bound of the scale; 0: none.
    least_scale = 0.0
    # Keep the scale constant; steps with an overflow are still skipped.
    fixed = False
    # Gradients are unscaled after each backward, as in manual optimization; a step only looks for overflows.
    takes_unscaled = False

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step as torch does; a fused optimizer does not unscale again."""
        if self.takes_unscaled and self._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale as torch does, within ``least_scale`` and ``fixed``."""
        if self.fixed and new_scale is None:
            new_scale = float(self._init_scale)
        super().update(new_scale)
        scale = self._scale
        if self.least_scale and scale is not None:
            scale.clamp_(min=self.least_scale)

    def forget_unscaled(self) -> None:
        """Discard unscaled gradients without a step; torch would otherwise refuse to unscale the next ones."""
        self._per_optimizer_states.clear()

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        inv_scale = torch.ones_like(inv_scale) if self.takes_unscaled else inv_scale
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
    """A strategy that clips gradients itself, because they are averaged elsewhere."""

    def clip_norm(self, optimizer: Optimizer, max_norm: float, error_if_nonfinite: bool) -> None:
        """Scale the gradients of the next step so that their norm is at most ``max_norm``."""

    def clip_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clamp each element to ``[-limit, limit]``."""


class _GradientRules(Precision):
    """Gradient clipping over all shards."""

    # Set by strategies whose gradients are averaged elsewhere; None: clip those of the parameters.
    clipper: GradientClipper | None = None
    error_if_nonfinite = False
    # Set by strategies whose gradients are split over more than the meshes of DTensors.
    scope: GradientScope | None = None
    # Set by the trainer: which hooks are overridden; None: call all, as Lightning does.
    hooks: HookTable | None = None
    # Called with the optimizer after clipping, right before its step.
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
        return tensor  # unlike Lightning, not detached: backward has freed the graph already

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
        with torch._C.DisableTorchFunction():  # modes that watch user code
            clip_gradient_value(self.main_params(optimizer), clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scale gradients so that the norm over all shards is at most ``clip_val``."""
        if self.clipper is not None:
            self.clipper.clip_norm(optimizer, clip_val, self.error_if_nonfinite)
            return
        with torch._C.DisableTorchFunction():
            clip_gradient_norm(self.main_params(optimizer), clip_val, self.error_if_nonfinite, self.scope)


class FullPrecision(_GradientRules):
    """``precision="32"``: everything in single precision."""

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Step like Lightning's, through fewer calls."""

        def completed() -> Any:
            result = closure()
            self._after_closure(model, optimizer)
            return result

        return optimizer.step(closure=completed, **kwargs)


class FullDoublePrecision(_GradientRules, DoublePrecision):
    """``precision="64"``: everything in double precision."""


class PureHalfPrecision(_GradientRules, HalfPrecision):
    """``precision="bf16-true"`` or ``"16-true"``: weights, gradients and optimizer state in half precision."""


class AutocastPrecision(_GradientRules, MixedPrecision):
    """``precision="bf16-mixed"`` or ``"16-mixed"``: single-precision state, autocast in the forward pass.

    ``"16-mixed"`` scales the loss dynamically; works on CPU too. Autocast's weight cache is off: it would keep a
    half-precision copy of every weight until the end of the forward pass, under ZeRO-3 and checkpointing too.
    """

    def __init__(self, precision: Any, device: str, scaler: torch.amp.GradScaler | None = None) -> None:
        if scaler is None and precision == "16-mixed":
            scaler = AgreedGradScaler(device=device, init_scale=_INITIAL_SCALE.get(device, 2.0**16))
        super().__init__(precision, device, scaler)

    def autocast_context_manager(self) -> torch.autocast:
        """Return an autocast context without the weight cache."""
        return torch.autocast(self.device, dtype=AUTOCAST_DTYPES[self.precision], cache_enabled=False)

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss, then call ``on_before_backward``."""
        if isinstance(self.scaler, AgreedGradScaler):
            keeps = traits_of(module.trainer.strategy).holds_step_gradients
            self.scaler.takes_unscaled = keeps and not module.automatic_optimization
            self._scale_gradients(module, self.scaler.get_scale())
        if self.hooks is not None and self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Call ``on_after_backward``; manual optimization sees unscaled gradients."""
        if self.scaler is not None:
            self._scale_gradients(module, 1 / self.scaler.get_scale())
        return super().post_backward(tensor, module)

    def _scale_gradients(self, module: LightningModule, factor: float) -> None:
        """Multiply the gradients of manual optimization, which user code may clip and accumulate between backwards."""
        if not getattr(self.scaler, "takes_unscaled", False):
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            groups = (group for optimizer in module.trainer.strategy.optimizers for group in optimizer.param_groups)
            trained = (p for group in groups for p in group["params"] if p.requires_grad and p.grad is not None)
            for gradient in {id(p.grad): local_tensor(p.grad) for p in trained}.values():
                gradient.mul_(factor)
                gradient.sub_(gradient * 0)  # infinities become NaN, which clipping by value does not hide


def set_loss_scale(plugin: Precision, initial: float | None, growth_interval: int, least: float, fixed: bool) -> None:
    """Configure loss scaling; see :class:`~trainwright.trainer.loop.loss_scale.LossScaling`.

    Raises:
        ValueError: if the plugin scales no loss, or is a custom one.
    """
    if not isinstance(plugin, AutocastPrecision) or plugin.scaler is None:
        raise ValueError(
            f"loss_scale is given, but {type(plugin).__name__} scales no loss: only precision='16-mixed' does. "
            "Use that precision, or leave loss_scale out."
        )
    first = initial or plugin.scaler.get_scale()
    scaler = AgreedGradScaler(device=plugin.device, init_scale=first, growth_interval=growth_interval)
    scaler.least_scale, scaler.fixed = least, fixed
    plugin.scaler = scaler


def adapt_precision(plugin: Precision | None) -> Precision | None:
    """Replace one of Lightning's plugins by its counterpart here; return any other unchanged."""
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
    """Return the dtype named ``fp32``, ``bf16`` or ``fp16``; ``None`` for ``None``."""
    return None if name is None else DTYPES[name]


def autocast_dtype(plugin: Precision) -> torch.dtype | None:
    """Return the autocast dtype of a plugin; ``None``: it does not use autocast, as far as is known."""
    return AUTOCAST_DTYPES[plugin.precision] if isinstance(plugin, AutocastPrecision) else None


def takes_before_update(plugin: Precision) -> bool:
    """Return whether the plugin supports :func:`before_update`."""
    return isinstance(plugin, _GradientRules)


def before_update(plugin: Precision, function: Callable[[Optimizer], None] | None) -> None:
    """Call ``function`` right before each optimizer update; ``None``: off.

    Raises:
        ValueError: if the plugin is a custom one.
    """
    if isinstance(plugin, _GradientRules):
        plugin.before_update = function
    elif function is not None:
        raise ValueError(
            f"The precision plugin {type(plugin).__name__} has no hook after gradient clipping, which compressed steps "
            "of Adam and strategy.placement need. Use one of Lightning's, such as precision='bf16-mixed'."
        )


def _agreed(scaler: torch.amp.GradScaler | None, device: str) -> torch.amp.GradScaler | None:
    if scaler is None or type(scaler) is not torch.amp.GradScaler or not scaler.is_enabled():
        return scaler
    return AgreedGradScaler(
        device=device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )
