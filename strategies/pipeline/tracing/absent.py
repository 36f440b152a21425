"""Parameters of other stages, as code that iterates over a module's parameters sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.contract.cuts import METADATA

_of_class: Any = Tensor
_HARMLESS = METADATA | {
    *(_of_class.requires_grad.__get__, _of_class.requires_grad.__set__, Tensor.requires_grad_),
    *(_of_class.grad.__get__, _of_class._version.__get__, Tensor.is_inference),
}
_ASSIGNMENTS = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"}
_ITSELF = {_of_class.data.__get__, _of_class.data.__set__, Tensor.detach}


class AbsentParameter(Tensor):
    """A parameter without values.

    Its place among others, shape, dtype and device are known. Changing it by itself (``clamp_``) does nothing, as its
    own stage does it. All else raises, on both stages if a parameter of another one takes part.
    """

    parameter_name: str
    _is_param = True  # an nn.Parameter for isinstance

    @classmethod
    def of(cls, ghost: Tensor, name: str, is_trained: bool) -> AbsentParameter:
        """Return one like ``ghost``."""
        with torch._C.DisableTorchFunction():
            zeros = torch.zeros((), dtype=ghost.dtype, device=ghost.device).expand(ghost.shape)
            made: Any = zeros.as_subclass(cls).requires_grad_(is_trained)
        made.parameter_name = name
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that need no values, and ignore changes of absent parameters."""
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        absent = [each for each in tensors if isinstance(each, cls)]
        if len(absent) == len(tensors) and (func in _ITSELF or _is_in_place(func.__name__)):
            return args[0]
        raise RuntimeError(partial_use(absent[0].parameter_name))


def _is_in_place(name: str) -> bool:
    return name in _ASSIGNMENTS or (name.endswith("_") and not name.endswith("__"))


def partial_use(name: str) -> str:
    """Return the error of code that would compute with a part of the parameters."""
    return (
        "A step uses parameters outside of their modules, where code sees only those of this rank's stage of the "
        f"pipeline (such as a penalty over self.parameters()), so the result would miss others: {name}. Use the "
        "optimizer's weight_decay, a hook such as on_train_batch_end, where parameters are whole, or pipeline=1."
    )
