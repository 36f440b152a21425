"""Tensors without values, for a step on the whole batch that must not compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainwright.core.torch_internals import FakeTensor, FakeTensorMode, _disable_current_modes
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.pipeline.tracing import sample_functions as functions
from trainwright.strategies.pipeline.tracing.block_values import Placeholder
from trainwright.strategies.pipeline.value_spec import PLAIN, tensors_in

# Calls of functions whose results are known; numbers among their arguments may differ in each step.
_MOST = 1000


class Written(Protocol):
    """The module as written."""

    @property
    def parameters(self) -> Sequence[Any]:
        """Its parameters, with ``name``, whole ``shape`` and ``slots``."""

    def shown(self, parameters: Mapping[str, nn.Parameter], device: torch.device) -> AbstractContextManager[None]:
        """Show it, with these parameters, in a ``with`` block."""


class StandIns:
    """Tensors without values for parameters, and for outputs of modules that have some.

    Modules and functions run on them once for each form of their arguments.

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
        self._calls: dict[Any, tuple[Any, functions.Operators]] = {}
        self._keys: dict[int, str] = {}
        self._leaf = torch.zeros((), requires_grad=True)
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
        place = self._key_of(module), module.training, _key((args, kwargs), is_strict=False)
        if place not in self._outputs:
            with self.shown():
                self._outputs[place] = pytree.tree_map_only(Tensor, self.like, module(*args, **kwargs))
        output = self._fresh(self._outputs[place])
        if any(not tensor.dim() for tensor in tensors_in(output)):
            self.transparent.add(id(module))
        return output

    def call(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, functions.Operators]:
        """Return what a function returns for arguments without values, and its operators."""
        key = func, _key((args, kwargs)), torch.is_grad_enabled(), torch.is_autocast_enabled(self._device.type)
        if key in self._calls:
            output, ran = self._calls[key]
            return self._fresh(output), ran
        with functions.Operators() as ran:
            output = func(*args, **kwargs)
        given = {id(each) for each in tensors_in((args, kwargs))}
        is_new = [_is_fake(each) and id(each) not in given for each in pytree.tree_leaves(output)]
        if is_new and all(is_new) and not ran.read_values:
            if len(self._calls) == _MOST:
                self._calls.clear()
            self._calls[key] = self._fresh(output), ran
        return output, ran

    def _fresh(self, known: Any) -> Any:
        """Return new tensors like known ones; non-leaf if they require grad, so that they may be changed in place."""
        if not isinstance(known, Tensor):
            return pytree.tree_map_only(Tensor, self._fresh, known)
        make = partial(_like, self._mode, known)  # as an argument, a tensor would keep its graph alive
        return _NonLeaf.apply(self._leaf, make) if known.requires_grad else make()

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
        if all(isinstance(tensor, FakeTensor) for tensor in tensors_in((args, kwargs))):
            return args, kwargs
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
        return FakeTensor(self._mode, torch.empty(tuple(shape), dtype=dtype, device="meta"), self._device)


class _NonLeaf(torch.autograd.Function):
    """Creates a tensor with a ``grad_fn``, several times faster than an operator of a :class:`FakeTensorMode`."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Create it."""
        return make()


def _like(mode: FakeTensorMode, known: Tensor) -> Tensor:
    made = torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device="meta")
    return FakeTensor(mode, made, known.device)


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.layout is torch.strided


def _key(value: Any, is_strict: bool = True) -> Any:
    """Return a key that is equal for arguments of one form.

    Args:
        value: the arguments.
        is_strict: whether objects that are no plain values equal no others; else, those of their type.
    """
    if isinstance(value, Tensor):
        stride = value.stride() if value.layout is torch.strided else value.layout
        return tuple(value.shape), stride, value.dtype, value.device, value.requires_grad
    if isinstance(value, tuple | list):
        return type(value), *(_key(each, is_strict) for each in value)
    if isinstance(value, dict):
        return (*((name, _key(each, is_strict)) for name, each in value.items()),)
    if isinstance(value, slice):
        return slice, *(_key(each, is_strict) for each in (value.start, value.stop, value.step))
    if isinstance(value, _PLAIN):
        return type(value), value
    leaves = pytree.tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:  # a registered dataclass
        return type(value), *(_key(each, is_strict) for each in leaves)
    return object() if is_strict else type(value)


_PLAIN = (*PLAIN, torch.device, torch.layout, torch.memory_format, type(...))
