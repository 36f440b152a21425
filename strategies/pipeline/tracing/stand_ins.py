"""Tensors without values, for a step on the whole batch that must not compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
        self._keys: dict[int, Any] = {}
        self.transparent: set[int] = set()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the module as written with parameters without values."""
        now = {each.name: (each.shape, getattr(*each.slots[0])) for each in self._written.parameters}
        found = {
            name: nn.Parameter(self._empty(shape, tensor.dtype), requires_grad=tensor.is_floating_point())
            for name, (shape, tensor) in now.items()
        }
        with with_attributes(self._gates, current=None), self._written.shown(found, self._device):
            yield

    def output(self, module: nn.Module, args: Any, kwargs: Any, key: Any = None) -> Any:
        """Return a module's output.

        Args:
            module: of the user.
            args, kwargs: of the call.
            key: equal for modules that return the same shapes; default: the module.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        forms = tuple(
            (tuple(leaf.shape), leaf.dtype)
            if isinstance(leaf, Tensor)
            else (leaf if isinstance(leaf, PLAIN) else type(leaf))
            for leaf in leaves
        )
        place = id(module) if key is None else key, module.training, str(spec), forms
        if place not in self._outputs:
            with self.shown():
                made = module(*args, **kwargs)
            if key is None and any(not tensor.dim() for tensor in tensors_in(made)):
                self.transparent.add(id(module))
            self._outputs[place] = pytree.tree_map_only(Tensor, self.like, made)
        # Clones: in-place changes of a leaf are errors.
        return pytree.tree_map_only(Tensor, Tensor.clone, self._outputs[place])

    def key_of(self, block: nn.Module) -> Any:
        """Return a key that is equal for blocks whose outputs have the same shapes."""
        owners = {id(sub): path for path, sub in block.named_modules()}
        if id(block) not in self._keys:
            shapes = [
                (owners[id(owner)], key, each.shape)
                for each in self._written.parameters
                for owner, key in each.slots
                if id(owner) in owners
            ]
            self._keys[id(block)] = type(block), tuple(sorted(shapes))
        return self._keys[id(block)]

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
