"""Stand-ins for split parameters and gradients, which gather the whole tensor on use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.contract.cuts import METADATA, StandIn

_Call = Callable[..., Any]
_of_class: Any = Tensor


class WholeTensors(Protocol):
    """Source of values for stand-ins; see :class:`~trainwright.strategies.base.whole.view.WholeView`."""

    def parameter(self, name: str) -> Tensor:
        """Return the whole parameter, gathered on first use. A collective."""

    def own(self, name: str) -> Tensor:
        """Return the whole parameter in memory of its own, which user code may keep or replace. A collective."""

    def gradient(self, name: str) -> Tensor:
        """Return the whole averaged gradient. A collective."""

    def gradient_stand_in(self, name: str) -> Tensor | None:
        """Return a stand-in for the gradient; ``None`` if there is none."""

    def set_gradient(self, name: str, value: Tensor | None) -> None:
        """Set or drop the gradient."""

    def requires_grad(self, name: str) -> bool:
        """Return whether the parameter is trained."""

    def set_requires_grad(self, name: str, value: bool) -> None:
        """Freeze or unfreeze the parameter."""

    def refuse(self, name: str, what: str) -> None:
        """Raise, since ``what`` is not possible with a split parameter."""


class WholeTensor(StandIn):
    """Stand-in for a parameter or its gradient, with the shape of the whole.

    Metadata is available without communication. Other functions of torch get the whole tensor, gathered by
    :class:`WholeTensors`; changes are written back later.
    """

    metadata = METADATA
    refusal = "{} was called on the stand-in of a parameter; use the parameter's own methods."
    whole_name: str
    whole_kind: str
    wholes: WholeTensors

    @staticmethod
    def of(wholes: WholeTensors, name: str, like: Tensor, shape: torch.Size, kind: str = "parameter") -> WholeTensor:
        """Return a stand-in.

        Args:
            wholes: source of values.
            name: of the parameter.
            like: for dtype and device.
            shape: of the whole.
            kind: ``"parameter"``, ``"gradient"`` or ``"value"``, the plain tensor in a ``state_dict``.
        """
        made = WholeTensor.like(like, shape, requires_grad=False)
        made.whole_name, made.whole_kind, made.wholes = name, kind, wholes
        if kind == "parameter":
            made._is_param = True
        return made

    def whole(self) -> Tensor:
        """Return the whole tensor. A collective."""
        if self.whole_kind == "gradient":
            return self.wholes.gradient(self.whole_name)
        whole = self.wholes.parameter(self.whole_name)
        return whole if self.whole_kind == "parameter" else whole.detach()

    @classmethod
    def run(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Run ``func`` on whole tensors instead of stand-ins."""
        if args and isinstance(args[0], WholeTensor) and args[0].whole_kind == "parameter" and func in _SPECIAL:
            return _SPECIAL[func](*args, **kwargs)
        args, kwargs = stand_ins_to_wholes((args, kwargs))
        return func(*args, **kwargs)


def stand_ins_to_wholes(value: Any) -> Any:
    """Return ``value`` with every stand-in replaced by its whole tensor."""
    return pytree.tree_map_only(WholeTensor, lambda tensor: tensor.whole(), value)


def _set_grad(tensor: WholeTensor, value: Tensor | None) -> None:
    tensor.wholes.set_gradient(tensor.whole_name, stand_ins_to_wholes(value))


def _set_requires_grad(tensor: WholeTensor, value: bool = True) -> WholeTensor:
    tensor.wholes.set_requires_grad(tensor.whole_name, value)
    return tensor


def _set_data(tensor: WholeTensor, value: Tensor) -> None:
    whole, value = tensor.wholes.own(tensor.whole_name), stand_ins_to_wholes(value)
    if value.shape != whole.shape or value.dtype != whole.dtype:
        tensor.wholes.refuse(tensor.whole_name, "it gets data of another shape or dtype")
    whole.data = value.detach()


def _refusing(what: str) -> Callable[..., None]:
    return lambda tensor, *_: tensor.wholes.refuse(tensor.whole_name, what)


_refuse_hook = _refusing("a gradient hook is registered on it during a run")


# Functions of parameters beyond their values.
_SPECIAL: dict[Any, _Call] = {
    _of_class.grad.__get__: lambda tensor: tensor.wholes.gradient_stand_in(tensor.whole_name),
    _of_class.grad.__set__: _set_grad,
    _of_class.grad.__delete__: lambda tensor: _set_grad(tensor, None),
    _of_class.requires_grad.__get__: lambda tensor: tensor.wholes.requires_grad(tensor.whole_name),
    _of_class.requires_grad.__set__: _set_requires_grad,
    Tensor.requires_grad_: _set_requires_grad,
    _of_class.data.__get__: lambda tensor: tensor.wholes.own(tensor.whole_name).data,
    _of_class.data.__set__: _set_data,
    Tensor.register_hook: _refuse_hook,
    Tensor.register_post_accumulate_grad_hook: _refuse_hook,
    Tensor.__deepcopy__: _refusing("it, or a module around it, is copied with copy.deepcopy"),
}
