"""Saving and restoring a module's state around a trial run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.plan.module_state import ModuleState


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
            t.untyped_storage()._cdata: (name, t, t.detach())
            for name, t in tensors.items()
            if t.numel() and not t.is_meta
        }
        self._saved: dict[str, Tensor] = {}

    def before(self, written: Iterable[Tensor]) -> None:
        """Save every watched parameter that an operator is about to write to."""
        for tensor in written:
            name, _, memory = self._watched.get(tensor.untyped_storage()._cdata, ("", tensor, tensor))
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
    kept = ModuleState(module)
    try:
        yield
    finally:
        kept.restore()
