"""Snapshot of a module's state beside the values of its parameters: tensors, attributes, containers and objects."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.contract.same_model import are_equal

# Dicts of every module that are modified in place.
TABLES = (
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
# Exact types, since subclasses may not support clearing.
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
# Packages whose instances are shared with the trainer or opaque.
_FOREIGN = ("builtins", "torch", "lightning", "lightning_fabric", "pytorch_lightning", "trainwright", "numpy")
# Maximum number of visited objects; more are data rather than state.
_MOST_OBJECTS = 100_000
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
# Standard attributes of every module, which hold no results.
_REGISTERS = frozenset(nn.Module().__dict__) - {"training"}


class KeptObjects:
    """Contents of containers and plain objects, recursively.

    Args:
        values: roots; modules are skipped.
        tensors: whether to save the values of tensors too.
    """

    def __init__(self, values: Iterable[Any], *, tensors: bool = False) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor, int | None]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._objects: list[tuple[str, Any, dict[str, Any]]] = []
        self._seen: set[int] = set()
        self._copies_tensors = tensors
        for value in values:
            self._keep(value)

    def _keep(self, value: Any, path: str = "") -> None:
        if id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return
        if isinstance(value, Tensor):
            self._seen.add(id(value))
            if self._copies_tensors and _has_own_memory(value):
                self._tensors[id(value)] = value, value.detach().clone(), _version_of(value)
        elif type(value) in _CONTAINERS:
            self._seen.add(id(value))
            self._containers[id(value)] = value, value.copy()
            for item in list(value.values() if isinstance(value, dict) else value):
                self._keep(item, path)
        elif isinstance(value, tuple):
            for item in value:
                self._keep(item, path)
        elif _is_plain_object(value):
            self._seen.add(id(value))
            self._objects.append((path, value, dict(vars(value))))
            for item in list(vars(value).values()):
                self._keep(item, path)

    def forget_unchanged(self) -> None:
        """Drop saved values of tensors that were not modified since."""
        self._tensors = {
            key: (tensor, value, version)
            for key, (tensor, value, version) in self._tensors.items()
            if version is None or tensor._version != version
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all contents."""
        for tensor, value, _ in self._tensors.values():
            if tensor.shape != value.shape:
                tensor.set_(value.clone())  # type: ignore[call-overload]
            elif not torch.equal(tensor, value):
                tensor.detach().copy_(value)
        for container, content in self._containers.values():
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)
        for _, held, attributes in self._objects:
            vars(held).clear()
            vars(held).update(attributes)


def _has_own_memory(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a plain tensor with writable elements."""
    if type(tensor) is not Tensor or not tensor.is_leaf or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _version_of(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_plain_object(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | nn.Module)
        and kind.__module__.partition(".")[0] not in _FOREIGN
    )


@dataclass
class ModuleLooks:
    """Snapshot of a submodule: its class, attributes and tables."""

    kind: type
    attributes: dict[str, Any]
    tables: dict[str, dict[Any, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, without: Collection[str] = ()) -> ModuleLooks:
        values = vars(module)
        tables = {name: dict(values[name]) for name in TABLES if name in values and name not in without}
        attributes = {k: v for k, v in values.items() if k not in TABLES and k not in without}
        return cls(type(module), attributes, tables)

    @property
    def state(self) -> dict[str, Any]:
        """Attributes and buffers."""
        return {**self.attributes, **self.tables.get("_buffers", {})}

    def put(self, module: nn.Module) -> None:
        """Restore the submodule."""
        values = vars(module)
        if type(module) is not self.kind:
            module.__class__ = self.kind
        tables = {name: values[name] for name in self.tables}
        values.clear()
        values.update(self.attributes)
        for name, content in self.tables.items():
            tables[name].clear()
            tables[name].update(content)
            values[name] = tables[name]


class Change(NamedTuple):
    """Difference between a snapshot and now.

    Attributes:
        path: of the submodule; ``""`` is the module itself.
        name: of the attribute or buffer.
        kind: ``tensor``, ``number`` or ``object``.
        value: the later one.
        is_first: whether there was none, or ``None``, before.
    """

    path: str
    name: str
    kind: str
    value: Any
    is_first: bool

    @property
    def label(self) -> str:
        """Path and name, as in user code."""
        return f"{self.path}.{self.name}" if self.path else self.name


class ModuleState(KeptObjects):
    """Snapshot of the state of a module that a step may change: buffers, attributes, containers and objects in them.

    Changes elsewhere (files, global variables) are not covered, nor are the values of parameters.

    Args:
        module: the whole module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__((), tensors=True)
        self._modules = [(path, sub, ModuleLooks.of(sub)) for path, sub in module.named_modules()]
        self._trained = [(p, p.requires_grad, p.grad, p.data) for p in module.parameters()]
        for path, _, looks in self._modules:
            for value in looks.state.values():
                self._keep(value, path)

    def changes(self) -> Iterator[Change]:
        """Yield the differences between the snapshot and now."""
        places = [(path, looks.state, ModuleLooks.of(sub).state) for path, sub, looks in self._modules]
        places += [(path, kept, vars(held)) for path, held, kept in self._objects if not _is_library(held)]
        for path, kept, now in places:
            for name in dict.fromkeys((*kept, *now)):
                before, value = kept.get(name), now.get(name)
                if name not in _REGISTERS and self._differs(before, value):
                    yield Change(path, name, _kind_of(before if value is None else value), value, before is None)

    def _differs(self, before: Any, now: Any) -> bool:
        if isinstance(now, Tensor) or isinstance(before, Tensor):
            known = self._tensors.get(id(now))
            return before is not now or (known is not None and not are_equal(*known[:2]))
        if isinstance(now, _NUMBERS) and isinstance(before, _NUMBERS):
            both_nan = before != before and now != now
            return type(before) is not type(now) or (before != now and not both_nan)
        if before is not now:
            return not isinstance(now, tuple) or pytree.tree_leaves(now) != pytree.tree_leaves(before)
        _, kept = self._containers.get(id(now), (now, None))
        if kept is None or len(kept) != len(now) or isinstance(now, set):
            return kept is not None and len(kept) != len(now)
        pairs = [(kept.get(key), now[key]) for key in now] if isinstance(now, dict) else zip(kept, now, strict=True)
        return any(self._differs(*pair) for pair in pairs)

    def restore(self) -> None:
        """Restore the module."""
        for _, sub, looks in self._modules:
            looks.put(sub)
        super().restore()
        for parameter, requires_grad, gradient, memory in self._trained:
            if type(memory) is Tensor and parameter.data_ptr() != memory.data_ptr():
                parameter.data = memory
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient


def _kind_of(value: Any) -> str:
    return "tensor" if isinstance(value, Tensor) else "number" if isinstance(value, _NUMBERS) else "object"


def _is_library(value: Any) -> bool:
    return callable(value) or type(value).__module__.startswith("transformers.")
