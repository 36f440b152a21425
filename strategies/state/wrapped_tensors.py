"""Optimizer state in tensor subclasses that wrap plain tensors, such as torchao's 8-bit states.

A checkpoint holds the wrapped tensors and the class's name. Only classes that their library has declared safe to load
(:func:`torch.serialization.add_safe_globals`) are built again: nothing is imported by a name from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainwright.core.errors import CheckpointError
from trainwright.core.torch_internals import is_traceable_wrapper_subclass

_CLASS, _CONTEXT, _TENSORS = "wrapper_class", "context", "tensors"
# End of messages about saved optimizers: what to do instead of resuming from them.
OTHERWISE = "in configure_optimizers, or start from the weights alone with init_from=<the checkpoint>."


def is_wrapped(value: Any) -> bool:
    """Return whether a value is a wrapper subclass other than DTensor."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and is_traceable_wrapper_subclass(value)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the memory of a tensor: itself, or those it wraps."""
    if is_wrapped(tensor):
        for name in cast(Any, tensor).__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def flattened(tensor: Tensor) -> dict[str, Any]:
    """Return a wrapper as a dict of its class name, plain context and wrapped tensors."""
    names, context = cast(Any, tensor).__tensor_flatten__()
    return {
        _CLASS: _name_of(type(tensor)),
        _CONTEXT: [str(value) if isinstance(value, torch.dtype) else value for value in context],
        _TENSORS: {name: getattr(tensor, name) for name in names},
    }


def rebuilt(value: Any) -> Any:
    """Return the wrapper that :func:`flattened` described; any other value as it is.

    Raises:
        CheckpointError: if no loaded library declares its class safe to load.
    """
    if not (isinstance(value, Mapping) and set(value) == {_CLASS, _CONTEXT, _TENSORS}):
        return value
    known = {_name_of(each): each for each in torch.serialization.get_safe_globals() if isinstance(each, type)}
    kind: Any = known.get(value[_CLASS])
    if kind is None or not issubclass(kind, Tensor):
        raise CheckpointError(
            f"The checkpoint holds optimizer state of class {value[_CLASS]}, which no imported library declares safe "
            f"to load. Make the same optimizer {OTHERWISE}"
        )
    dtypes = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    context = [dtypes.get(each, each) if isinstance(each, str) else each for each in value[_CONTEXT]]
    return kind.__tensor_unflatten__(dict(value[_TENSORS]), context, None, None)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
