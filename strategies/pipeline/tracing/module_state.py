"""Snapshot of a module's state beside its parameters: tensors, plain values and containers of its attributes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright.core.torch_internals import _pytree as pytree

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)
# Standard attributes of every module, which hold no results.
_REGISTERS = frozenset(nn.Module().__dict__) - {"training"}


class Change(NamedTuple):
    """Difference between two states.

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


class ModuleState:
    """Snapshot of a module's state.

    Includes attributes of the user's objects that modules hold; excludes hooks and the values of parameters, but not
    which memory (``.data``) they have.

    Args:
        module: whose state is copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._seen: set[int] = set()
        self._data = [(p, p.data) for p in module.parameters() if type(p.data) is Tensor]
        for path, sub in module.named_modules():
            self._keep_place(path, sub._buffers)
            self._keep_place(path, sub.__dict__)
            for name, hooks in vars(sub).items():
                if "hooks" in name and name in _REGISTERS:
                    self._contents[id(hooks)] = hooks, dict(hooks)

    def _keep_place(self, path: str, place: dict[str, Any]) -> None:
        self._seen.add(id(place))
        kept = {name: value for name, value in place.items() if name not in _REGISTERS}
        self._places.append((path, place, kept))
        for value in kept.values():
            self._keep(path, value)

    def _keep(self, path: str, value: Any) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and type(value) is Tensor and not value.is_meta:
                self._seen.add(id(value))
                self._tensors[id(value)] = value, value.detach().clone()
        elif isinstance(value, _CONTAINERS):
            self._seen.add(id(value))
            self._contents[id(value)] = value, type(value)(value) if type(value) in _CONTAINERS else None
            for item in value.values() if isinstance(value, dict) else value:
                self._keep(path, item)
        elif isinstance(value, tuple):
            for item in value:
                self._keep(path, item)
        elif _is_users(value):
            self._seen.add(id(value))
            self._keep_place(path, value.__dict__)

    def changes(self) -> Iterator[Change]:
        """Yield the differences between the snapshot and now."""
        for path, place, kept in self._places:
            now = {name: value for name, value in place.items() if name not in _REGISTERS}
            for name in dict.fromkeys((*kept, *now)):
                before, value = kept.get(name), now.get(name)
                if self._differs(before, value):
                    kind = _kind_of(before if value is None else value)
                    yield Change(path, name, kind, value, before is None)

    def _differs(self, before: Any, now: Any) -> bool:
        if isinstance(now, Tensor) or isinstance(before, Tensor):
            known = self._tensors.get(id(now))
            return before is not now or (known is not None and not torch.equal(known[0], known[1]))
        if isinstance(now, _NUMBERS) and isinstance(before, _NUMBERS):
            both_nan = before != before and now != now
            return type(before) is not type(now) or (before != now and not both_nan)
        if before is not now:
            return not isinstance(now, tuple) or pytree.tree_leaves(now) != pytree.tree_leaves(before)
        known_content = self._contents.get(id(now))
        return known_content is not None and known_content[1] is not None and _other(known_content[1], now, self)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the snapshot."""
        for parameter, data in self._data:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        for _, place, kept in self._places:
            for name in [name for name in place if name not in _REGISTERS and name not in kept]:
                del place[name]
            place.update({name: value for name, value in kept.items() if place.get(name) is not value})
        for container, content in self._contents.values():
            if content is None:
                continue
            container.clear()
            container.update(content) if isinstance(container, (dict, set)) else container.extend(content)
        for tensor, value in self._tensors.values():
            if not torch.equal(tensor, value):
                tensor.copy_(value)


def _other(before: Any, now: Any, state: ModuleState) -> bool:
    if len(before) != len(now):
        return True
    if isinstance(now, dict):
        return before.keys() != now.keys() or any(state._differs(before[key], now[key]) for key in now)
    return not isinstance(now, set) and any(state._differs(a, b) for a, b in zip(before, now, strict=True))


def _kind_of(value: Any) -> str:
    return "tensor" if isinstance(value, Tensor) else "number" if isinstance(value, _NUMBERS) else "object"


def _is_users(value: Any) -> bool:
    """Return whether a value is an object of a user class with state in attributes."""
    library = type(value).__module__.partition(".")[0]
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, type))
        and not callable(value)
        and library not in ("builtins", "torch", "lightning", "lightning_fabric", "trainwright", "transformers")
    )
