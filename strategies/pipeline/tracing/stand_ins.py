"""Tensors without values, for a step on the whole batch that must not compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainwright.core.torch_internals import FakeTensor, FakeTensorMode, _disable_current_modes
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.pipeline.tracing import sample_functions as functions
from trainwright.strategies.pipeline.tracing.block_values import Placeholder
from trainwright.strategies.pipeline.value_spec import PLAIN, tensors_in


class Written(Protocol):
    """The module as written."""

    @property
    def parameters(self) -> Sequence[Any]:
        """Its parameters, with ``name``, whole ``shape`` and ``slots``."""

    def shown(self, parameters: Mapping[str, nn.Parameter], device: torch.device) -> AbstractContextManager[None]:
        """Show it, with these parameters, in a ``with`` block."""


class StandIns:
    """Tensors without values for parameters, and for outputs of modules that have some.

    A module runs on them once for each set of shapes.

    Args:
        written: the module as written.
        gates: off while it runs.
        device: of the step.

    Attributes:
        transparent: ids of modules that return a single number, whose calls are followed.
    """

    def __init__(self, written: Written, gates: Any, device: torch.device) -> None:
        self._written, self._gates, self._device = written, gates, device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._outputs: dict[Any, Any] = {}
        self._keys: dict[int, str] = {}
        self.transparent: set[int] = set()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the module as written with parameters without values."""
        found = {}
        for each in self._written.parameters:
            dtype = getattr(*each.slots[0]).dtype
            found[each.name] = nn.Parameter(self._empty(each.shape, dtype), requires_grad=dtype.is_floating_point)
        with with_attributes(self._gates, current=None), self._written.shown(found, self._device):
            yield

    def output(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return a module's output."""
        place = self._key_of(module), module.training, str(pytree.tree_map(_form, (args, kwargs)))
        if place not in self._outputs:
            with self.shown():
                made = module(*args, **kwargs)
            self._outputs[place] = pytree.tree_map_only(Tensor, self.like, made)
        if any(not tensor.dim() for tensor in tensors_in(self._outputs[place])):
            self.transparent.add(id(module))
        # Clones: in-place changes of a leaf are errors.
        return pytree.tree_map_only(Tensor, Tensor.clone, self._outputs[place])

    def _key_of(self, module: nn.Module) -> str:
        """Return a key that is equal for modules whose outputs have the same shapes."""
        if id(module) not in self._keys:
            shapes = [self._shapes.get(id(sub)) for sub in module.modules()]
            self._keys[id(module)] = f"{module} {shapes}"
        return self._keys[id(module)]

    @cached_property
    def _shapes(self) -> dict[int, list[Any]]:
        """Shapes of the parameters of each module, by its id."""
        found: dict[int, list[Any]] = {}
        for each in self._written.parameters:
            for owner, key in each.slots:
                found.setdefault(id(owner), []).append((key, each.shape))
        return found

    def like(self, tensor: Tensor) -> Tensor:
        """Return a tensor without values."""
        made = self._empty(tuple(tensor.shape), tensor.dtype)
        return made.requires_grad_() if made.is_floating_point() else made

    def without_values(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments without values of parameters and activations."""
        if func is Tensor.__getitem__ and not isinstance(args[1], str):
            args = (args[0], functions.positions(args[1]))
        known: dict[int, tuple[int, ...]] = {}

        def replace(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor) or not (
                tensor.requires_grad or isinstance(tensor, nn.Parameter | Placeholder)
            ):
                return tensor
            if not known:
                known.update({id(getattr(*each.slots[0])): each.shape for each in self._written.parameters})
            made = self._empty(known.get(id(tensor), tuple(tensor.shape)), tensor.dtype)
            return made.requires_grad_(tensor.requires_grad)

        return pytree.tree_map_only(Tensor, replace, (args, kwargs))  # type: ignore[no-any-return]

    def without_running(self, func: Callable[[], Any]) -> Any:
        """Return what ``func`` returns for data, without values; runs it if its shapes depend on values."""
        try:
            with _disable_current_modes(), self._mode:
                return func()
        except Exception:
            return func()

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with self._mode:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, PLAIN) else type(leaf)
