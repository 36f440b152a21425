"""Outputs of blocks that stay split by position: up to the next block, or from the last one up to the loss.

Logits ``B x T x V`` are the largest tensor of a language model. Gathering hidden states after the last block would make
every rank of the context group compute and hold all of them. A :class:`SequenceSlice` looks like the whole tensor to
user code, applies position-wise functions to this rank's positions, and gathers itself for anything else. Results are
always right; only memory depends on the functions used.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.context.collectives import gather_all, make_whole, sum_alike
from trainwright.strategies.context.order import SequenceOrder
from trainwright.strategies.contract.cuts import StandIn


@dataclass(frozen=True)
class SequenceRows:
    """Positions of a :class:`SequenceSlice`, and those of this rank.

    Args:
        group: the ranks that share the sequences.
        order: of their split.
        length: of the sequences when they were split.
        start, stop: range of the remaining positions.
        batch: number of sequences if they are flattened with positions into dim 0; ``None``: positions are dim 1.
        re_enters: whether the gathered whole may enter a block, which takes other rows on each rank, so that gradients
            of all ranks are summed; ``False``: all ranks compute the same from it.
    """

    group: dist.ProcessGroup
    order: SequenceOrder
    length: int
    start: int
    stop: int
    batch: int | None = None
    re_enters: bool = False

    @property
    def dim(self) -> int:
        """The dim of positions."""
        return 1 if self.batch is None else 0

    @property
    def is_all(self) -> bool:
        """True if all positions remain, so that all ranks hold equally many."""
        return (self.start, self.stop) == (0, self.length)

    @property
    def held(self) -> int:
        """Number of this rank's positions."""
        return sum(stop - start for start, stop, _, _ in self._spans())

    def leading(self, local: Tensor) -> tuple[int, ...]:
        """Return the sizes of the dims of sequences and positions of the tensor whose part is ``local``."""
        positions = self.stop - self.start
        return (local.size(0), positions) if self.batch is None else (self.batch * positions,)

    def select(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's positions, along ``dim``, of a whole tensor."""
        if self.batch is not None:
            rows = replace(self, batch=None).select(whole.unflatten(dim, (self.batch, -1)), dim + 1)
            return rows.flatten(dim, dim + 1)
        pieces = [whole.narrow(dim, start - self.start, stop - start) for start, stop, _, _ in self._spans()]
        return torch.cat(pieces, dim)

    def whole(self, local: Tensor) -> Tensor:
        """Gather the whole tensor on every rank. A differentiable collective of the group."""
        if self.batch is not None:
            unflat = replace(self, batch=None).whole(local.unflatten(0, (self.batch, self.held)))
            return unflat.flatten(0, 1)
        pieces = []
        held = local.split([stop - start for start, stop, _, _ in self._spans()], 1)
        for piece, (_, _, before, after) in zip(held, self._spans(), strict=True):
            # Collectives need equal parts: removed positions are padded with zeros, and removed again below.
            padding = [0, 0] * (local.ndim - 2) + [before, after]
            pieces.append(F.pad(piece, padding) if before or after else piece)
        gather = gather_all if self.re_enters else make_whole
        whole = gather(torch.cat(pieces, 1), self.group, self.order, 1)
        return whole if self.is_all else whole.narrow(1, self.start, self.stop - self.start)

    def _spans(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield, per chunk, the range of remaining positions and the numbers removed before and after it."""
        size = self.length // self.order.chunks
        for chunk in self.order.held(self.order.rank):
            begin, end = chunk * size, (chunk + 1) * size
            start = min(max(begin, self.start), end)
            stop = max(min(end, self.stop), start)
            yield start, stop, start - begin, end - stop


class SequenceSlice(StandIn):
    """Tensor ``(B, T, ...)`` or ``(B x T, ...)`` of which this rank holds some positions.

    Shape, dtype and device are those of the whole. Row-wise functions (linear, norms, activations, casts, arithmetic
    with numbers and with tensors that broadcast over positions or have all of them, reductions of the last dim), slices
    of positions, flattening sequences with positions, and cross-entropy use this rank's rows. Anything else gathers the
    whole first, which all ranks of the group must do together: code that runs on one rank only must not use it.

    Args:
        local: this rank's positions.
        rows: their place in the whole.
    """

    refusal = (
        "{} was given an output whose sequence is split over the context axis, through a function that torch does not "
        "let it handle (a custom autograd function or kernel). Type strategy.context=1 (in the engine: "
        "split_outputs=False)."
    )
    local: Tensor
    rows: SequenceRows

    @staticmethod
    def __new__(cls, local: Tensor, rows: SequenceRows) -> SequenceSlice:
        """Create the tensor whose part is ``local``."""
        made = cls.like(local, rows.leading(local) + tuple(local.shape[1 + rows.dim :]), local.requires_grad)
        made.local, made.rows = local, rows
        if local.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)
        return made

    @classmethod
    def run(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Run supported functions on this rank's rows; gather for others."""
        func = _observed_loss(func)
        name = _name(func)
        _check_graph((*args, *kwargs.values()))
        handler = _HANDLERS.get(name)
        result = NotImplemented if handler is None or not args else handler(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if name == "__setitem__" or name in _WRITES or isinstance(kwargs.get("out"), SequenceSlice):
            raise RuntimeError(
                f"{name} writes to an output whose sequence is split over the context axis, which would lose the "
                "values. Compute a new tensor, as torch.where and masked_fill do."
            )
        args, kwargs = pytree.tree_map_only(SequenceSlice, SequenceSlice.whole, (args, kwargs))
        return func(*args, **kwargs)

    def whole(self) -> Tensor:
        """Gather the whole tensor. A differentiable collective of the context group."""
        return self.rows.whole(self.local)

    @property
    def has_all_positions(self) -> bool:
        """True if all positions remain and are dim 1, as in hidden states."""
        return self.rows.is_all and self.rows.batch is None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Describe this rank's part, without a collective."""
        return f"SequenceSlice(shape={tuple(self.shape)}, held={tuple(self.local.shape)})"


def _refuse_gradient(_: Tensor) -> Tensor:
    raise SequenceSlice.refused("A function")


_WRITES = {name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")} - {"requires_grad_"}

# torch's own functions: observers of losses replace them in torch.nn.functional.
_LOSSES = (F.cross_entropy, F.nll_loss)


def _observed_loss(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss function that ``func`` observes, or ``func``; the observer has seen this call already."""
    bound = func.args if isinstance(func, partial) else ()
    return next((value for value in bound if any(value is loss for loss in _LOSSES)), func)


def _check_graph(values: tuple[Any, ...]) -> None:
    """Refuse outputs of custom autograd functions, whose gradients would not reach the part."""
    with torch._C.DisableTorchFunctionSubclass():
        if any(isinstance(value, SequenceSlice) and not value.is_leaf for value in values):
            raise SequenceSlice.refused("A function")


def _name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # a property
        return f"{name}:{getattr(getattr(func, '__self__', None), '__name__', '')}"
    return name


# ---------------------------------------------------------------------------------------------------------------------
# Handlers return a result, or NotImplemented to gather the tensors. `func` is called with parts of the tensors.

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


def _leaf(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """Apply a function that concerns the autograd graph to the part."""
    return func(args[0].local, *args[1:], **kwargs)


def _elementwise(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """Apply an element-wise function; other tensors are broadcast."""
    slices = [value for value in (*args, *kwargs.values()) if isinstance(value, SequenceSlice)]
    like = slices[0]
    if any(s.rows != like.rows or s.ndim != like.ndim for s in slices):
        return NotImplemented
    parts = [_aligned(value, like) for value in args]
    named = {name: _aligned(value, like) for name, value in kwargs.items()}
    if any(part is NotImplemented for part in (*parts, *named.values())):
        return NotImplemented
    result = func(*parts, **named)
    leading = tuple(like.local.shape[: 1 + like.rows.dim])
    if not isinstance(result, Tensor) or tuple(result.shape[: len(leading)]) != leading:
        return NotImplemented
    return SequenceSlice(result, like.rows)


def _aligned(value: Any, like: SequenceSlice) -> Any:
    """Return an operand of an element-wise function for this rank's rows."""
    if isinstance(value, SequenceSlice):
        return value.local
    if not isinstance(value, Tensor):
        return value
    rows = like.rows
    from_end = like.ndim - rows.dim
    if value.ndim < from_end or value.size(-from_end) == 1:
        return NotImplemented if value.ndim > like.ndim else value
    if value.ndim > like.ndim or value.size(-from_end) != like.size(rows.dim):
        return NotImplemented
    return rows.select(value, value.ndim - from_end)


def _in_place(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    if not isinstance(args[0], SequenceSlice):
        return NotImplemented
    result = _elementwise(func, args, kwargs)
    if result is NotImplemented:
        return NotImplemented
    args[0].local = result.local
    return args[0]


def _row_wise(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """Apply a row-wise function; the other arguments are parameters."""
    first, *others = args
    if not isinstance(first, SequenceSlice) or any(isinstance(v, SequenceSlice) for v in (*others, *kwargs.values())):
        return NotImplemented
    return SequenceSlice(func(first.local, *others, **kwargs), first.rows)


def _norm(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
    is_of_rows = isinstance(args[0], SequenceSlice) and len(shape) < args[0].ndim - args[0].rows.dim
    return _row_wise(func, args, kwargs) if is_of_rows else NotImplemented


def _dropout(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    # With unequal numbers of positions, the generators of ranks would diverge.
    return _row_wise(func, args, kwargs) if args[0].rows.is_all else NotImplemented


def _last_dim(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """Apply a function along the last dim."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = dim if isinstance(dim, list | tuple) else [dim]
    first = args[0]
    if not isinstance(first, SequenceSlice) or first.ndim < 2 + first.rows.dim:
        return NotImplemented
    if any(not isinstance(d, int) or isinstance(d, bool) or d not in (-1, first.ndim - 1) for d in dims):
        return NotImplemented
    result = func(first.local, *args[1:], **kwargs)
    return pytree.tree_map_only(Tensor, lambda tensor: SequenceSlice(tensor, first.rows), result)


def _index(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """Slice positions and the dims after them."""
    first, index = args
    if not isinstance(first, SequenceSlice):
        return NotImplemented
    entries = list(index) if isinstance(index, tuple) else [index]
    if sum(entry is Ellipsis for entry in entries) == 1:
        at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
        entries[at : at + 1] = [slice(None)] * (first.ndim - len(entries) + 1)
    if len(entries) > first.ndim or not all(isinstance(entry, slice) for entry in entries):
        return NotImplemented
    rows, lead = first.rows, 1 + first.rows.dim
    if any(entry.indices(size) != (0, size, 1) for entry, size in zip(entries[: lead - 1], first.shape, strict=False)):
        return NotImplemented
    if len(entries) < lead:
        return first
    start, stop, step = entries[lead - 1].indices(first.size(lead - 1))
    if step != 1 or stop <= start or (rows.batch is not None and stop - start != first.size(0)):
        return NotImplemented
    local = first.local[(*[slice(None)] * lead, *entries[lead:])]
    if rows.batch is None:
        kept = replace(rows, start=rows.start + start, stop=rows.start + stop)
        local = _narrowed(local, rows, kept)
        rows = kept
    return SequenceSlice(local, rows)


def _narrowed(local: Tensor, rows: SequenceRows, kept: SequenceRows) -> Tensor:
    pieces, offset = [], 0
    for (start, stop, _, _), (first, last, _, _) in zip(rows._spans(), kept._spans(), strict=True):
        pieces.append(local.narrow(1, offset + min(first, stop) - start, max(last - first, 0)))
        offset += stop - start
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _reshape(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """Flatten or unflatten sequences and positions; reshape the dims after them."""
    first, *shape = args
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if kwargs or not isinstance(first, SequenceSlice) or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    wanted = _filled(list(sizes), first.numel())
    rows, local = first.rows, first.local
    positions = rows.stop - rows.start
    batch = first.size(0) if rows.batch is None else rows.batch
    trailing = math.prod(first.shape[1 + rows.dim :])
    if wanted[:1] == [batch * positions] and math.prod(wanted[1:]) == trailing:
        return SequenceSlice(local.reshape(batch * rows.held, *wanted[1:]), replace(rows, batch=batch))
    if wanted[:2] == [batch, positions] and math.prod(wanted[2:]) == trailing:
        return SequenceSlice(local.reshape(batch, rows.held, *wanted[2:]), replace(rows, batch=None))
    return NotImplemented


def _filled(sizes: list[int], numel: int) -> list[int]:
    if -1 in sizes:
        sizes[sizes.index(-1)] = numel // max(1, -math.prod(sizes))
    return sizes


def _flatten(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    first = args[0]
    names = ("start_dim", "end_dim")
    start, end = (args[i + 1] if len(args) > i + 1 else kwargs.get(names[i], (0, -1)[i]) for i in (0, 1))
    start, end = start % first.ndim, end % first.ndim
    shape = [*first.shape[:start], math.prod(first.shape[start : end + 1]), *first.shape[end + 1 :]]
    return _reshape(func, (first, shape), {})


def _row_loss(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """Compute cross-entropy of integer labels: this rank's rows, then one all-reduce of a number."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    scores, target = given.pop("input"), given.pop("target")
    reduction = given.pop("reduction", "mean")
    old_style = {given.pop("size_average", None), given.pop("reduce", None)} - {None}
    if not isinstance(scores, SequenceSlice) or isinstance(target, SequenceSlice) or given.get("weight") is not None:
        return NotImplemented
    rows = scores.rows
    is_rows = rows.batch is not None and scores.ndim == 2 and target.ndim == 1 and target.size(0) == scores.size(0)
    if not is_rows or old_style or target.is_floating_point() or reduction not in ("mean", "sum"):
        return NotImplemented
    # Unreduced, since in half precision a sum over all rows would overflow.
    losses = func(scores.local, rows.select(target, 0), reduction="none", **given)
    exact = losses.dtype if losses.dtype is torch.float64 else torch.float32
    total = sum_alike(losses.to(exact).sum(), rows.group)
    if reduction == "mean":
        total = total / (target != given.get("ignore_index", -100)).sum()
    return total.to(losses.dtype)


_Handler = Callable[[Callable[..., Any], _Args, _Kwargs], Any]
_HANDLERS: dict[str, _Handler] = {
    **dict.fromkeys(
        ["register_hook", "retain_grad", "__get__:grad_fn", "__get__:is_leaf", "__get__:grad", "__get__:_base"], _leaf
    ),
    **dict.fromkeys(
        ["float", "half", "bfloat16", "double", "to", "type", "type_as", "cpu", "cuda", "detach", "clone", "contiguous"]
        + ["relu", "gelu", "silu", "mish", "elu", "leaky_relu", "selu", "hardswish", "softplus", "tanh", "sigmoid"]
        + ["abs", "neg", "exp", "log", "sqrt", "rsqrt", "square", "pow", "clamp", "clip", "reciprocal", "nan_to_num"]
        + ["add", "sub", "mul", "div", "true_divide", "multiply", "divide", "subtract", "rsub", "where", "masked_fill"]
        + [f"__{name}__" for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg")]
        + ["eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"],
        _elementwise,
    ),
    **dict.fromkeys(
        ["add_", "sub_", "mul_", "div_", "clamp_", "tanh_", "__iadd__", "__isub__", "__imul__", "__itruediv__"],
        _in_place,
    ),
    "linear": _row_wise,
    **dict.fromkeys(["layer_norm", "rms_norm"], _norm),
    "dropout": _dropout,
    **dict.fromkeys(
        ["softmax", "log_softmax", "mean", "sum", "var", "logsumexp", "argmax", "argmin", "amax", "amin", "max"],
        _last_dim,
    ),
    "__getitem__": _index,
    **dict.fromkeys(["view", "reshape"], _reshape),
    "flatten": _flatten,
    **dict.fromkeys(["cross_entropy", "nll_loss"], _row_loss),
}
