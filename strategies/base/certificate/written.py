"""The module as written by the user, restored temporarily after a layout has modified it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.base.kept_parameters import redirected
from trainwright.strategies.base.parameter_memory import keep_in_place
from trainwright.strategies.contract.attributes import NotCopied
from trainwright.strategies.pipeline.cut import refresh_recurrent
from trainwright.strategies.plan.module_state import ModuleLooks
from trainwright.strategies.plan.slots import Slot, find_slots

_NAME = "_trainwright_as_written"
# Not saved between steps, since they would keep unsharded tensors alive.
_TENSORS = ("_parameters", "_buffers", "_flat_weights", "_flat_weight_refs")
_ABSENT = object()


@dataclass(frozen=True)
class WrittenParameter:
    """A parameter of the module as written.

    Args:
        name: its fully qualified name, the first if tied.
        shape: before sharding.
        requires_grad: whether it was trained at setup.
        slots: every module that registers it, and the name there.
        hooks: the user's gradient hooks.
    """

    name: str
    shape: tuple[int, ...]
    requires_grad: bool
    slots: tuple[Slot, ...]
    hooks: tuple[Any, ...] = ()


class AsWritten(NotCopied):
    """Snapshot of a module before a strategy replaces classes, forwards, hooks and parameters.

    :meth:`shown` modifies the same module objects temporarily, so that references to them (hooks, closures) stay valid.

    Args:
        module: unmodified by any strategy.
    """

    def __init__(self, module: nn.Module) -> None:
        # A list, since some modules (metrics) hash by their contents.
        self._all = list(module.modules())
        self._before = [ModuleLooks.of(sub, _TENSORS) for sub in self._all]
        self.is_new = True
        """True if the module was not set up by a run yet, so that its parameters are unsharded."""
        self._names: dict[int, str] = {id(sub): name for name, sub in module.named_modules()}
        self._after: list[ModuleLooks] = []
        slots = find_slots(module)
        self.parameters = tuple(
            WrittenParameter(
                name, tuple(p.shape), p.requires_grad, tuple(slots[id(p)]), tuple((p._backward_hooks or {}).values())
            )
            for name, p in module.named_parameters()
        )

    @classmethod
    def of(cls, module: nn.Module) -> AsWritten:
        """Return the snapshot of ``module``, taken at its first call."""
        known = module.__dict__.get(_NAME)
        if known is None:
            known = cls(module)
            object.__setattr__(module, _NAME, known)
        elif not known.is_new:
            known._take_changes()
        return known

    def _take_changes(self) -> None:
        """Take over what the user has changed since the setup of an earlier run."""
        for sub, before, after in zip(self._all, self._before, self._after, strict=True):
            now = ModuleLooks.of(sub, _TENSORS)
            _merge(before.attributes, after.attributes, now.attributes)
            for name, table in now.tables.items():
                _merge(before.tables.setdefault(name, {}), after.tables.get(name, {}), table)

    def name_of(self, module: nn.Module) -> str:
        """Return the (first) fully qualified name of a submodule."""
        return self._names[id(module)]

    def set_up(self) -> None:
        """Record the module as modified by the strategy, at setup."""
        self._after = [ModuleLooks.of(sub, _TENSORS) for sub in self._all]
        self.is_new = False

    @contextmanager
    def shown(self, parameters: Mapping[str, nn.Parameter], device: torch.device) -> Iterator[None]:
        """Restore the module as written in a ``with`` block.

        Args:
            parameters: replacements of its parameters, by name.
            device: of this rank, to which setup moved the module.
        """
        now = [ModuleLooks.of(sub) for sub in self._all]
        try:
            for place in range(len(self._all)):
                self._show(place, device)
            for written in self.parameters:
                for owner, key in written.slots:
                    owner.__dict__.pop(key, None)  # a placeholder for another stage's parameter
                    owner._parameters[key] = parameters[written.name]
            for sub in self._all:
                refresh_recurrent(sub)
            keep_in_place(self._all[0])
            with redirected(self._placed(now)):
                yield
        finally:
            for sub, looks in zip(self._all, now, strict=True):
                looks.put(sub)

    def _placed(self, looks: Sequence[ModuleLooks]) -> Iterator[tuple[Tensor, nn.Module, str]]:
        """Yield each parameter that the module had, which user code may have kept, with its place."""
        for sub, each in zip(self._all, looks, strict=True):
            yield from ((p, sub, key) for key, p in each.tables["_parameters"].items() if p is not None)

    def _show(self, place: int, device: torch.device) -> None:
        """Undo the strategy's changes of one module."""
        sub = self._all[place]
        before, after, values = self._before[place], self._after[place], vars(sub)
        if type(sub) is after.kind is not before.kind:
            sub.__class__ = before.kind
        for key in before.attributes.keys() | after.attributes.keys():
            was, became = before.attributes.get(key, _ABSENT), after.attributes.get(key, _ABSENT)
            if was is not became and values.get(key, _ABSENT) is became:
                values.pop(key, None)
                if was is not _ABSENT:
                    values[key] = pytree.tree_map(partial(_moved, device), was)
        for name, was_table in before.tables.items():
            table, became_table = values[name], after.tables.get(name, {})
            for key in [k for k in table if k in became_table and k not in was_table]:
                del table[key]
            for key, value in was_table.items():
                if table.get(key, _ABSENT) is became_table.get(key, _ABSENT) is not value:
                    table[key] = value


def _merge(before: dict[Any, Any], after: Mapping[Any, Any], now: Mapping[Any, Any]) -> None:
    for key in after.keys() | now.keys():
        if now.get(key, _ABSENT) is not after.get(key, _ABSENT):
            before.pop(key, None)
            before.update({key: now[key]} if key in now else {})


def _moved(device: torch.device, value: Any) -> Any:
    """Return ``value`` as setup moves it, such as the state of a metric and its device."""
    if isinstance(value, torch.device):
        return device
    return value.to(device) if isinstance(value, Tensor) else value
