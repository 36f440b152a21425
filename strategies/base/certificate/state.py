"""Saving and restoring a module's state around a trial run."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.base.certificate.written import _Looks, _put
from trainwright.strategies.contract.gradients import local_tensor

# Exact types, since subclasses may not support clearing.
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
# Packages whose instances are shared with the trainer or opaque.
_FOREIGN = ("builtins", "torch", "lightning", "lightning_fabric", "pytorch_lightning", "trainwright", "numpy")
# Maximum number of visited objects; more are data rather than state.
_MOST_OBJECTS = 100_000


class KeptObjects:
    """Contents of containers and plain objects, recursively.

    Args:
        values: roots; modules are skipped.
        tensors: whether to save the values of tensors too.
    """

    def __init__(self, values: Iterable[Any], *, tensors: bool = False) -> None:
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._versions = WeakIdKeyDictionary()
        self._containers: list[tuple[Any, Any]] = []
        self._objects: list[tuple[Any, dict[str, Any]]] = []
        self._seen: set[int] = set()
        self._copies_tensors = tensors
        for value in values:
            self._keep(value)

    def _keep(self, value: Any) -> None:
        if id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return
        if isinstance(value, Tensor):
            self._seen.add(id(value))
            if self._copies_tensors and _has_own_memory(value):
                self._tensors.append((value, value.detach().clone()))
                self._versions[value] = None if value.is_inference() else value._version
        elif type(value) in _CONTAINERS:
            self._seen.add(id(value))
            self._containers.append((value, value.copy()))
            for item in list(value.values() if isinstance(value, dict) else value):
                self._keep(item)
        elif isinstance(value, tuple):
            for item in value:
                self._keep(item)
        elif _is_plain_object(value):
            self._seen.add(id(value))
            self._objects.append((value, dict(vars(value))))
            for item in list(vars(value).values()):
                self._keep(item)

    def forget_unchanged(self) -> None:
        """Drop saved values of tensors that were not modified since."""
        self._tensors = [
            (tensor, value)
            for tensor, value in self._tensors
            if tensor.is_inference() or tensor._version != self._versions[tensor]
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all contents."""
        for tensor, value in self._tensors:
            if tensor.shape != value.shape:
                tensor.set_(value.clone())  # type: ignore[call-overload]
            else:
                tensor.detach().copy_(value)
        for container, content in self._containers:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)
        for held, attributes in self._objects:
            vars(held).clear()
            vars(held).update(attributes)


class KeptState(KeptObjects):
    """Copy of the state of a module that a step may change: buffers, attributes, containers, plain objects within them.

    Changes elsewhere (files, global variables) are not covered.

    Args:
        module: the whole module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [(sub, _Looks.of(sub)) for sub in module.modules()]
        self._trained = [(p, p.requires_grad, p.grad) for p in module.parameters()]
        looks = [looks for _, looks in self._modules]
        values = (v for each in looks for v in (*each.attributes.values(), *each.tables.get("_buffers", {}).values()))
        super().__init__(values, tensors=True)

    def restore(self) -> None:
        """Restore the module."""
        for sub, looks in self._modules:
            _put(sub, looks, vars(sub))
        super().restore()
        for parameter, requires_grad, gradient in self._trained:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient


def _has_own_memory(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a plain tensor with writable elements."""
    if type(tensor) is not Tensor or not tensor.is_leaf or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_plain_object(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | nn.Module)
        and kind.__module__.partition(".")[0] not in _FOREIGN
    )


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to, local shards of DTensors."""
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (local_tensor(leaf) for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether values are equal up to rounding, such as of an average of equal weights."""
    if not one.is_floating_point() or one.shape != other.shape:
        return torch.equal(one, other)
    return torch.allclose(one.double(), other.double(), 8 * torch.finfo(one.dtype).eps, 0.0, equal_nan=True)


class WrittenWeights:
    """Parameters that user code modifies during a trial (e.g. by weight averaging), to be restored.

    Args:
        tensors: this rank's parameters, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # With an alias of each, since user code may give a parameter other memory (``.data = ...``).
        self._watched = {
            t.untyped_storage().data_ptr(): (name, t, t.detach())
            for name, t in tensors.items()
            if t.numel() and not t.is_meta
        }
        self._saved: dict[str, Tensor] = {}

    def before(self, written: Iterable[Tensor]) -> None:
        """Save every watched parameter that an operator is about to write to."""
        for tensor in written:
            name, _, memory = self._watched.get(tensor.untyped_storage().data_ptr(), ("", tensor, tensor))
            if name and name not in self._saved:
                self._saved[name] = memory.clone()

    def changed(self) -> set[str]:
        """Return names of parameters whose values have changed."""
        return {
            name
            for name, held, memory in self._watched.values()
            if held.data_ptr() != memory.data_ptr() or (name in self._saved and not is_same(held, self._saved[name]))
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Restore modified parameters."""
        for name, held, memory in self._watched.values():
            if name in self._saved:
                memory.copy_(self._saved[name])
            if held.data_ptr() != memory.data_ptr():
                held.data = memory
        self._saved.clear()


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Restore ``module`` afterwards, except for its parameters' values."""
    kept = KeptState(module)
    try:
        yield
    finally:
        kept.restore()
