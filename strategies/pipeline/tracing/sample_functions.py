"""Functions by what they do to the samples of a batch: draw, reduce, or compute each by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.core.torch_internals import legacy_get_string
from trainwright.strategies.contract.gradients import widest
from trainwright.strategies.pipeline.value_spec import tensors_in

_DRAWING = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
    "multinomial", "poisson", "binomial", "bernoulli_", "normal_", "uniform_", "exponential_", "random_", "log_normal_",
    "cauchy_", "geometric_", "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_dropout", "feature_alpha_dropout", "native_dropout", "gumbel_softmax", "rrelu", "rrelu_",
}  # fmt: skip
_ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "truediv", "true_divide", "floordiv", "floor_divide", "pow", "neg"}
_ARITHMETIC |= {"subtract", "multiply", "divide", "negative", "clamp", "clip", "maximum", "minimum", "lerp"}
_RESHAPING = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "t", "permute", "movedim", "expand",
    "contiguous", "clone", "detach", "to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int",
    "bool", "cpu", "cuda", "requires_grad", "swapaxes", "view_as", "expand_as", "reshape_as", "alias", "chunk", "split",
    "unbind", "getitem", "get",
}  # fmt: skip
_ELEMENTWISE = {
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "and", "or", "xor",
    "invert", "bitwise_and", "bitwise_or", "bitwise_not", "abs", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh",
    "sigmoid", "relu", "sign", "round", "floor", "ceil", "where", "masked_fill", "setitem", "isnan", "isfinite",
    "isinf", "one_hot", "remainder", "mod", "square", "reciprocal", "zeros_like", "ones_like", "full_like",
    "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "nonzero", "masked_select",
}  # fmt: skip
_BY_SAMPLE = _ARITHMETIC | _RESHAPING | _ELEMENTWISE
_LINEAR = (_RESHAPING - {"bool", "long", "int", "get"}) | {"sum", "mean", "stack", "cat", "concat", "hstack", "nansum"}
_SELECTING = {"getitem", "index_select", "gather", "take", "take_along_dim", "index"}
_ADDING = {"add", "sub", "rsub", "neg", "subtract", "negative"}
_CROSS_ENTROPIES = {F.cross_entropy, F.nll_loss, getattr(F, "linear_cross_entropy", F.nll_loss)}


@cache
def stem_of(func: Callable[..., Any]) -> str:
    """Return the name of a function without underscores: ``add`` for ``Tensor.add_`` and ``Tensor.__iadd__``."""
    name = getattr(func, "__name__", str(func)).strip("_")
    return name[1:] if name[:1] in ("i", "r") and name[1:] in _ARITHMETIC else name


def draws(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether a call draws random numbers."""
    name = getattr(func, "__name__", "")
    if name not in _DRAWING or "dropout" not in name:
        return name in _DRAWING
    signature = _signature(func)
    given = {} if signature is None else signature.bind(*args, **kwargs).arguments
    return bool(given.get("training", True)) and given.get("p", 0.5) > 0


def is_attribute(func: Callable[..., Any], args: Any) -> bool:
    """Return whether a call reads or sets an attribute of a tensor that is no tensor of its values."""
    name = getattr(func, "__name__", "")
    return name in ("__set__", "__delete__") or (name == "__get__" and not isinstance(func(*args), Tensor))


def is_arithmetic(func: Callable[..., Any]) -> bool:
    """Return whether numbers among a function's arguments are operands."""
    return stem_of(func) in _ARITHMETIC


def computes_by_sample(func: Callable[..., Any], args: Any) -> bool:
    """Return whether each element of a result depends on the same sample's elements only."""
    return stem_of(func) in _BY_SAMPLE and not indices_of(func, args)


def indices_of(func: Callable[..., Any], args: Any) -> list[Tensor]:
    """Return the integer tensors by which a function selects elements."""
    if stem_of(func) not in _SELECTING:
        return []
    return [each for each in tensors_in(args[1:]) if each.dtype in (torch.int64, torch.int32)]


def is_write(func: Callable[..., Any]) -> bool:
    """Return whether a function returns its first argument, changed in place."""
    name: str = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (name[:3] == "__i" and stem_of(func) in _ARITHMETIC)


def is_linear(func: Callable[..., Any], args: Any, summed: Callable[[Any], bool]) -> bool:
    """Return whether a function is linear in those of its arguments that are sums over samples.

    Args:
        func, args: of the call.
        summed: whether an argument is such a sum.
    """
    stem, operands = stem_of(func), [summed(each) for each in args[:2]]
    if stem in ("mul", "multiply"):
        return sum(operands) < 2
    if stem in ("div", "divide", "truediv", "true_divide"):
        reverse = getattr(func, "__name__", "").startswith("__r")
        return len(operands) < 2 or not operands[0 if reverse else 1]
    if stem == "where":
        return not operands[0]
    return stem in _ADDING or stem in _LINEAR


@cache
def _signature(func: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(func)
    except (TypeError, ValueError):
        return None


def reduction_of(func: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """Return ``"sum"`` or ``"mean"`` for a sum, a mean or a loss with that reduction; ``""`` for other functions."""
    stem = stem_of(func)
    if stem in ("sum", "nansum", "mean"):
        return "mean" if stem == "mean" else "sum"
    signature = _signature(func)
    if signature is None or "reduction" not in signature.parameters or func.__module__ != F.__name__:
        return ""
    given = signature.bind(*args, **kwargs).arguments
    reduction = given.get("reduction", signature.parameters["reduction"].default)
    if given.get("size_average") is not None or given.get("reduce") is not None:
        reduction = legacy_get_string(given.get("size_average"), given.get("reduce"), emit_warning=False)
    return {"sum": "sum", "mean": "mean", "batchmean": "mean"}.get(reduction, "")


def class_mean(func: Callable[..., Any], args: Any, kwargs: Any) -> inspect.BoundArguments | None:
    """Return the arguments of a mean over class indices, whose divisor is :func:`valid_targets`; else ``None``."""
    if func not in _CROSS_ENTROPIES or reduction_of(func, args, kwargs) != "mean":
        return None
    signature = _signature(func)
    assert signature is not None
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return None if bound.arguments["target"].is_floating_point() else bound


def summed(func: Callable[..., Any], bound: inspect.BoundArguments) -> Tensor:
    """Return the sum instead of the mean of a loss."""
    bound.arguments.update(reduction="sum", **dict.fromkeys({"size_average", "reduce"} & bound.arguments.keys()))
    total: Tensor = func(*bound.args, **bound.kwargs)
    return total


# The default of ``ignore_index`` where it is None.
_IGNORED = -100


@torch.no_grad()
def valid_targets(arguments: Any) -> Tensor:
    """Return the divisor of a mean over class indices, in the widest float type of the device.

    The number of targets that are not ignored, or the sum of their class weights.
    """
    target: Tensor = arguments["target"]
    weight: Tensor | None = arguments["weight"]
    dtype = widest(target.device)
    ignored = arguments["ignore_index"]
    valid = target.ne(_IGNORED if ignored is None else ignored)
    if weight is None:
        return valid.sum(dtype=dtype)
    return (weight[target.masked_fill(~valid, 0)].to(dtype) * valid).sum()


def positions(index: Any) -> Any:
    """Return an index with positions instead of boolean tensors of known values."""
    entries: Iterable[Any] = index if isinstance(index, tuple) else (index,)
    found: list[Any] = []
    for entry in entries:
        is_mask = isinstance(entry, Tensor) and entry.dtype == torch.bool
        found.extend(entry.nonzero(as_tuple=True) if is_mask else [entry])
    return tuple(found)
