"""Logits whose loss is computed in chunks of positions, so that all logits never exist at once.

Logits ``(B, T, V)`` and what their loss keeps for backward are the largest tensors of a model with a large vocabulary.
:class:`ChunkedLogits` replaces them between the head and ``F.cross_entropy``, which computes the logits and losses of
a chunk at a time and recomputes its logits in backward. The head computes each chunk in place, as the layout requires.
(``F.linear_cross_entropy`` would need its weight, which may be sharded, and cannot include adapters.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

_Compute = Callable[[Tensor], Tensor]


def logits_in_chunks(model: nn.Module, chunk: int) -> AbstractContextManager[Any]:
    """Make the model's head return :class:`ChunkedLogits`.

    Args:
        model: of ``transformers``, also within one of ``peft``.
        chunk: positions per chunk; 0, or at least all positions: the head returns whole logits.

    Raises:
        ValueError: if the model has no head.
    """
    if not chunk:
        return nullcontext()
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise ValueError(f"module.loss_chunk={chunk}: {type(model).__name__} has no head. Type module.loss_chunk=0")
    compute = head.forward
    return patch.object(head, "forward", lambda hidden: linear(hidden, compute, chunk))


def linear(hidden: Tensor, compute: _Compute, chunk: int) -> Tensor:
    """Return logits of hidden states ``(..., H)``.

    Has torch's name, so that tensor subclasses (one of the context axis) treat it as row-wise.
    """
    if has_torch_function_unary(hidden):
        logits: Tensor = handle_torch_function(linear, (hidden,), hidden, compute, chunk)
        return logits
    if hidden.numel() <= chunk * hidden.shape[-1]:
        return compute(hidden)
    return ChunkedLogits(hidden, compute, chunk)


class ChunkedLogits(Tensor):
    """Lazy ``compute(hidden)``, logits ``(..., V)``.

    Casts, products with numbers, ``tanh`` and reshapes that keep the vocabulary last are deferred. Cross entropy with
    class indices computes chunks. Anything else computes and stores the whole logits.

    Args:
        hidden: ``(..., H)``.
        compute: the head, row by row.
        chunk: positions per chunk.
        like: a row of the logits; ``None``: computed.
    """

    hidden: Tensor
    compute: _Compute
    per_chunk: int
    _like: Tensor
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, hidden: Tensor, compute: _Compute, chunk: int, like: Tensor | None = None) -> ChunkedLogits:
        """Create a wrapper subclass with the shape of the logits."""
        if like is None:
            like = compute(hidden.flatten(0, -2)[:1])
            like = torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=like.requires_grad)
        made = Tensor._make_wrapper_subclass(
            cls,
            (*hidden.shape[:-1], like.shape[-1]),
            dtype=like.dtype,
            device=hidden.device,
            requires_grad=like.requires_grad,
        )
        made.hidden, made.compute, made.per_chunk, made._like, made._whole = hidden, compute, chunk, like, None
        return made

    def whole(self) -> Tensor:
        """Return the logits as an ordinary tensor."""
        if self._whole is None:
            _report_whole(self.per_chunk)
            self._whole = self.compute(self.hidden)
        return self._whole

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Describe the logits without computing them."""
        return f"ChunkedLogits(shape={tuple(self.shape)}, chunk={self.per_chunk})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Defer what can be deferred, compute chunks for a loss, and whole logits for anything else."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _ABOUT or (name == "__get__" and getattr(func, "__self__", None) in _ATTRIBUTES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(name)
        if handler is not None and isinstance(args[0], ChunkedLogits) and args[0]._whole is None:
            found = handler(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        args, kwargs = apply_to_collection((args, kwargs), ChunkedLogits, ChunkedLogits.whole)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse operations that bypass :meth:`__torch_function__`."""
        raise RuntimeError(f"{func} cannot take logits in chunks. Type module.loss_chunk=0")


_reported: set[int] = set()


def _report_whole(chunk: int) -> None:
    if chunk not in _reported:
        _reported.add(chunk)
        rank_zero_info(
            f"module.loss_chunk={chunk} has no effect: the model, the layout or the loss needs whole logits."
        )


def _each(func: Callable[..., Tensor], logits: ChunkedLogits, *args: Any, **kwargs: Any) -> Any:
    """Defer an elementwise function to each chunk."""
    if not all(isinstance(value, int | float | torch.dtype) for value in (*args, *kwargs.values())):
        return NotImplemented
    compute = logits.compute
    return ChunkedLogits(
        logits.hidden,
        lambda hidden: func(compute(hidden), *args, **kwargs),
        logits.per_chunk,
        func(logits._like, *args, **kwargs),
    )


def _reshape(func: Callable[..., Tensor], logits: ChunkedLogits, *args: Any, **kwargs: Any) -> Any:
    """Defer a reshape that keeps the vocabulary last; its shape is computed on the meta device."""
    shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if shape[-1:] != logits.shape[-1:]:
        return NotImplemented
    hidden = logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])
    return ChunkedLogits(hidden, logits.compute, logits.per_chunk, logits._like)


def _cross_entropy(
    func: Callable[..., Tensor],
    logits: ChunkedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    is_rows = logits.dim() == 2 and target.shape == logits.shape[:1] and not target.is_floating_point()
    if not is_rows or weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    compute = logits.compute

    device = logits.device.type

    def nats_of(hidden: Tensor, labels: Tensor) -> Tensor:
        # A cached cast of the weights would accumulate gradients of all chunks in 16 bits.
        with torch.autocast(device, enabled=torch.is_autocast_enabled(device), cache_enabled=False):
            rows = compute(hidden)
            return func(rows, labels, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)

    pairs = zip(logits.hidden.split(logits.per_chunk), target.split(logits.per_chunk), strict=True)
    if torch.is_grad_enabled():
        nats = torch.cat([checkpoint(nats_of, *pair, use_reentrant=False) for pair in pairs])
    else:
        nats = torch.cat([nats_of(*pair) for pair in pairs])
    if reduction == "none":
        return nats
    return nats.sum() / (target != ignore_index).sum() if reduction == "mean" else nats.sum()


_ABOUT = {"size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "__len__", "__hash__"}
_ABOUT |= {"element_size", "get_device", "is_inference"}
_NAMES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_mps", "layout", "is_sparse")
_ATTRIBUTES = [getattr(Tensor, name) for name in (*_NAMES, "is_meta", "is_nested", "is_quantized", "_version")]

_HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("float", "double", "half", "bfloat16", "to", "tanh", "mul", "__mul__", "__rmul__", "div"), _each),
    **dict.fromkeys(("true_divide", "__truediv__"), _each),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _reshape),
    "cross_entropy": _cross_entropy,
}
