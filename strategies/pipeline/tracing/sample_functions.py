"""Functions by what they do to the samples of a batch: draw, reduce, or compute each by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.core.torch_internals import TorchDispatchMode, legacy_get_string
from trainwright.strategies.contract.gradients import widest
from trainwright.strategies.pipeline.value_spec import tensors_in

# Operators without the tag ``pointwise`` that keep samples apart, too.
_COPIES = {"_to_copy", "copy", "lift_fresh", "_unsafe_view", "cat", "stack", "fill", "zero"}
_BY_SAMPLE = {*_COPIES, "floor_divide", "masked_select", "nonzero", "_local_scalar_dense", "index", "index_put"}
_SELECTING = {"index", "index_select", "gather", "take"}
_LINEAR = {*_COPIES, "clone", "add", "sub", "rsub", "neg", "sum", "mean", "mul", "div", "where"}
_CROSS_ENTROPIES = {F.cross_entropy, F.nll_loss, getattr(F, "linear_cross_entropy", F.nll_loss)}


class Operators(TorchDispatchMode):
    """The operators of one function call, by name, besides views.

    Attributes:
        draws: whether one draws random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: set[str] = set()
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record and run an operator."""
        name = func.overloadpacket.__name__.removesuffix("_")
        if func.namespace == "aten" and not func.is_view:
            self._names.add(name)
        # Attention has the tag without dropout, too.
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name
        return func(*args, **(kwargs or {}))

    @property
    def are_pointwise(self) -> bool:
        """True if numbers among the arguments are operands."""
        return any(map(_is_pointwise, self._names)) and self.compute_by_sample(())

    @property
    def read_values(self) -> bool:
        """True if shapes may depend on values, as in ``x[:, :lengths.max()]``."""
        return "_local_scalar_dense" in self._names

    def compute_by_sample(self, args: Any) -> bool:
        """Return whether each element of a result depends on the same sample's elements only."""
        return all(n in _BY_SAMPLE or _is_pointwise(n) for n in self._names) and not self.indices(args)

    def indices(self, args: Any) -> list[Tensor]:
        """Return the integer tensors by which the function selects elements."""
        given = tensors_in(args[1:]) if self._names & _SELECTING else []
        return [each for each in given if each.dtype in (torch.int64, torch.int32)]

    def select_by_mask(self, args: Any) -> bool:
        """Return whether the function selects elements by a boolean tensor."""
        return "index" in self._names and any(each.dtype == torch.bool for each in tensors_in(args[1:]))

    def are_linear(self, args: Any, summed: Callable[[Any], bool]) -> bool:
        """Return whether the function is linear in those of its arguments that are sums over samples.

        Args:
            args: of the call.
            summed: whether an argument is such a sum.
        """
        products = {"mul": sum(map(summed, args[:2])) > 1, "div": any(map(summed, args[1:2])), "where": summed(args[0])}
        return self._names <= _LINEAR and not any(products[name] for name in products.keys() & self._names)

    @property
    def reduction(self) -> str:
        """``"sum"`` or ``"mean"`` if it is the only operator, else ``""``."""
        return next(iter(self._names)) if self._names in ({"sum"}, {"mean"}) else ""


@cache
def _is_pointwise(name: str) -> bool:
    found = getattr(torch.ops.aten, name, None)
    return found is not None and any(torch.Tag.pointwise in getattr(found, each).tags for each in found.overloads())


def is_attribute(func: Callable[..., Any], args: Any) -> bool:
    """Return whether a call reads or sets an attribute of a tensor that is no tensor of its values."""
    name = getattr(func, "__name__", "")
    return name in ("__set__", "__delete__") or (name == "__get__" and not isinstance(func(*args), Tensor))


@cache
def _signature(func: Callable[..., Any]) -> inspect.Signature | None:
    try:
        found = inspect.signature(func)
    except (TypeError, ValueError):
        return None
    return found if "reduction" in found.parameters and func.__module__ == F.__name__ else None


def loss_arguments(func: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a loss of ``torch.nn.functional`` by name, as of now; empty for other functions."""
    signature = _signature(func)
    if signature is None:
        return {}
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    legacy = [bound.arguments.pop(name, None) for name in ("size_average", "reduce")]
    if legacy != [None, None]:
        bound.arguments["reduction"] = legacy_get_string(legacy[0], legacy[1], emit_warning=False)
    return bound.arguments


def is_class_mean(func: Callable[..., Any], arguments: dict[str, Any]) -> bool:
    """Return whether a loss is a mean over class indices, whose divisor is :func:`valid_targets`."""
    is_mean = func in _CROSS_ENTROPIES and arguments["reduction"] == "mean"
    return is_mean and not arguments["target"].is_floating_point()


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
