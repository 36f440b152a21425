"""Logits split by class over tensor ranks, and their cross-entropy.

Logits are never gathered in training: only three numbers per sample are reduced (the vocabulary-parallel loss of
Megatron-LM, arXiv:1909.08053, section 3). User code calls ``F.cross_entropy`` or ``nn.CrossEntropyLoss`` as usual and
gets a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from trainwright.strategies.contract.collectives.differentiable import copy_to, gather_same
from trainwright.strategies.contract.cuts import StandIn


class ShardedLogits(StandIn):
    """Logits ``(..., classes)`` of which this rank holds ``(..., classes / ranks)``.

    Shape, dtype and device are those of the whole. Supported:

    - ``F.cross_entropy`` with class indices, along any class dimension,
    - ``argmax(-1)``,
    - functions that are uniform over classes: casts, reshapes that keep the classes last, indexing of the other
      dimensions, ``transpose`` / ``permute``, products with a number, ``tanh``.

    Anything else raises a ``RuntimeError``.
    """

    refusal = (
        "With loss_parallel=true the logits are split over the tensor ranks, and {} of them is not possible; "
        "allowed are F.cross_entropy with class indices, argmax(-1), casts and reshapes that keep the classes last, "
        "and indexing of the other dimensions. Set loss_parallel=false to get whole logits."
    )
    _part: Tensor
    _group: dist.ProcessGroup
    _class_dim: int

    @staticmethod
    def wrap(part: Tensor, group: dist.ProcessGroup, class_dim: int = -1) -> ShardedLogits:
        """Return logits for this rank's ``part``, whose dimension ``class_dim`` is split over ``group``."""
        shape = list(part.shape)
        shape[class_dim] *= group.size()
        made = ShardedLogits.like(part, shape, part.requires_grad)
        made._part, made._group, made._class_dim = part, group, class_dim % part.dim()
        return made

    @property
    def is_last(self) -> bool:
        """True if the classes are the last dimension."""
        return self._class_dim == self.dim() - 1

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"ShardedLogits({tuple(self.shape)}, classes along dim {self._class_dim} over {self._group.size()} ranks)"
        )

    @classmethod
    def run(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a supported function on this rank's part."""
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            if name in ("grad_fn", "is_leaf"):
                return getattr(args[0]._part, name)
        handler = _HANDLERS.get(name)
        if handler is None or not args or not isinstance(args[0], ShardedLogits):
            raise cls.refused(name)
        return handler(func, *args, **kwargs)


def _same(func: Any, logits: ShardedLogits, *args: Any, **kwargs: Any) -> ShardedLogits:
    """Apply a function that changes neither shape nor order."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.dim() > 0]
    if tensors:
        raise ShardedLogits.refused(
            f"{getattr(func, '__name__', func)} with a tensor of shape {tuple(tensors[0].shape)}"
        )
    # The gradient of a trained scalar (a temperature) is summed over the ranks' classes.
    args = tuple(copy_to(a, logits._group) if isinstance(a, Tensor) and a.requires_grad else a for a in args)
    return ShardedLogits.wrap(func(logits._part, *args, **kwargs), logits._group, logits._class_dim)


def _reshape(func: Any, logits: ShardedLogits, *args: Any, **kwargs: Any) -> ShardedLogits:
    """Apply a reshape, tried on the meta device first, that must keep the classes last."""
    if func in (Tensor.view,) and args and isinstance(args[0], torch.dtype):
        raise ShardedLogits.refused("a view as another dtype")
    whole = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not logits.is_last or whole[-1:] != logits.shape[-1:]:
        raise ShardedLogits.refused(f"a reshape from {tuple(logits.shape)} to {tuple(whole)}")
    shape = (*whole[:-1], logits._part.shape[-1])
    return ShardedLogits.wrap(logits._part.reshape(shape), logits._group)


def _move(func: Any, logits: ShardedLogits, *args: Any, **kwargs: Any) -> ShardedLogits:
    """Permute dimensions; a meta tensor of distinct lengths locates the classes."""
    lengths = tuple(range(2, 2 + logits.dim()))
    moved = func(torch.empty(lengths, device="meta"), *args, **kwargs).shape
    return ShardedLogits.wrap(
        func(logits._part, *args, **kwargs), logits._group, moved.index(lengths[logits._class_dim])
    )


def _index(func: Any, logits: ShardedLogits, index: Any) -> ShardedLogits:
    """Index dimensions other than the classes, which must be last."""
    entries = index if isinstance(index, tuple) else (index,)
    has_ellipsis = any(entry is Ellipsis for entry in entries)
    used = sum(
        entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1
        for entry in entries
        if entry is not None and entry is not Ellipsis
    )
    untouched = entries[-1] == slice(None) if isinstance(entries[-1], slice) else entries[-1] is Ellipsis
    if not logits.is_last or not (untouched or (used < logits.dim() and not has_ellipsis)):
        raise ShardedLogits.refused("an index into the classes")
    return ShardedLogits.wrap(func(logits._part, index), logits._group)


def _argmax(func: Any, logits: ShardedLogits, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the index of the largest logit; gathers two numbers per sample and rank."""
    if dim is None or dim % logits.dim() != logits._class_dim:
        raise ShardedLogits.refused(f"argmax(dim={dim})")
    group, part = logits._group, logits._part.detach()
    values, indices = part.max(logits._class_dim, keepdim=True)
    indices = indices + group.rank() * part.shape[logits._class_dim]
    all_values = gather_same(values, logits._class_dim, group)
    all_indices = gather_same(indices, logits._class_dim, group)
    best = all_indices.gather(logits._class_dim, all_values.argmax(logits._class_dim, keepdim=True))
    return best if keepdim else best.squeeze(logits._class_dim)


def _cross_entropy(
    func: Any,
    logits: ShardedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if target.is_floating_point():
        raise ShardedLogits.refused("cross_entropy with probabilities as targets")
    if weight is not None and label_smoothing:
        raise ShardedLogits.refused("cross_entropy with both class weights and label_smoothing")
    class_dim = 0 if logits.dim() == 1 else 1
    if logits._class_dim != class_dim:
        raise ShardedLogits.refused(f"cross_entropy over dim {class_dim} (the classes are dim {logits._class_dim})")
    part, group = logits._part.movedim(class_dim, -1), logits._group
    if target.shape != part.shape[:-1]:
        raise ValueError(
            f"cross_entropy was given logits of shape {tuple(logits.shape)} and targets of shape "
            f"{tuple(target.shape)}; the targets' shape must be {tuple(part.shape[:-1])}."
        )
    if torch.is_autocast_enabled(part.device.type):
        part = part.float()  # as autocast does for the loss of whole logits
    ignored = target == ignore_index
    classes = part.shape[-1] * group.size()
    torch._assert_async(((target >= 0) & (target < classes) | ignored).all(), "cross_entropy: a target is no class")
    safe = target.masked_fill(ignored, 0)
    losses = cast(Tensor, _SampleLoss.apply(part, safe, group, label_smoothing))
    scale = (~ignored).to(losses.dtype) if weight is None else weight.to(losses.dtype)[safe] * ~ignored
    losses = losses * scale
    if reduction == "none":
        return losses.to(part.dtype)
    total = losses.sum() / scale.sum() if reduction == "mean" else losses.sum()
    return total.to(part.dtype)


class _SampleLoss(Function):
    """Negative log-likelihood of each sample in fp32, from split logits: ``(..., part)`` to ``(...)``."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, target: Tensor, group: dist.ProcessGroup, smoothing: float) -> Tensor:
        logits = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
        local = target - group.rank() * part.shape[-1]
        is_local = (local >= 0) & (local < part.shape[-1])
        local = local.masked_fill(~is_local, 0)
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        likely = logits.gather(-1, local[..., None])[..., 0].masked_fill(~is_local, 0)
        sums = [(logits - largest[..., None]).exp_().sum(-1), likely] + ([logits.sum(-1)] if smoothing else [])
        packed = torch.stack(sums)
        dist.all_reduce(packed, group=group)
        normalizer = packed[0].log() + largest
        ctx.save_for_backward(part, normalizer, local, is_local)
        ctx.smoothing, ctx.classes = smoothing, part.shape[-1] * group.size()
        loss = normalizer - packed[1]
        return torch.lerp(loss, normalizer - packed[2] / ctx.classes, smoothing) if smoothing else loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        part, normalizer, local, is_local = ctx.saved_tensors
        logits = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
        by_logit = (logits - normalizer[..., None]).exp_()
        if ctx.smoothing:
            by_logit -= ctx.smoothing / ctx.classes
        hit = is_local.to(by_logit.dtype) * (1 - ctx.smoothing)
        by_logit.scatter_add_(-1, local[..., None], -hit[..., None])
        return (by_logit * gradient[..., None]).to(part.dtype), None, None, None


_HANDLERS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("float", "double", "half", "bfloat16", "to", "type_as", "contiguous", "detach", "clone"), _same),
    **dict.fromkeys(("cpu", "cuda", "tanh", "mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__"), _same),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"), _reshape),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"), _move),
    "__getitem__": _index,
    "argmax": _argmax,
    "cross_entropy": _cross_entropy,
}
