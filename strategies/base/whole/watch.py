"""Uses of split weights by the user's step outside of the modules that support them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.core.torch_internals import _get_current_function_mode, _pop_mode, _push_mode
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.base.kept_parameters import KeptParameter, present
from trainwright.strategies.contract.cuts import METADATA, Cut
from trainwright.strategies.plan.blocks import uncompiled
from trainwright.strategies.plan.slots import Slot


def gathered(tensor: DTensor) -> Tensor:
    """Return the whole of a split tensor, differentiably. A collective of its ranks."""
    return _MeanGradient.apply(tensor.full_tensor(), ranks_of(tensor))  # type: ignore[no-any-return]


def joined(part: Tensor, cut: Cut) -> Tensor:
    """Return the whole of a part, differentiably. A collective of the ranks that hold the others."""
    return _Joined.apply(part, cut)  # type: ignore[no-any-return]


def ranks_of(tensor: DTensor) -> list[dist.ProcessGroup]:
    """Return the groups of ranks over which a tensor is split."""
    placed = enumerate(tensor.placements)
    return [tensor.device_mesh.get_group(axis) for axis, placement in placed if not placement.is_replicate()]


def mean_over(tensor: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Return the mean of a tensor over groups of ranks, in new memory. A collective."""
    tensor = tensor.detach().contiguous().clone()
    for group in groups:
        dist.all_reduce(tensor, group=group)
        tensor /= group.size()
    return tensor


class _MeanGradient(torch.autograd.Function):
    """The identity, whose gradient is averaged over groups of ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
        ctx.groups = groups
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return mean_over(gradient, ctx.groups), None


class _Joined(torch.autograd.Function):
    """Gathers a part; its gradient is this rank's part of the whole's, which all ranks have."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return cut.whole(part.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.cut.part(gradient), None


def is_write(func: Any) -> bool:
    """Return whether a function of torch writes to an argument, by its name."""
    name = getattr(func, "__name__", "")
    return (
        name in ("__set__", "__setitem__")
        or (name.rstrip("_") != name and not name.startswith("__"))
        or name.startswith("__i")
    )


_CALL = nn.Module._call_impl.__code__
# Element-wise functions, which commute with splitting.
ELEMENTWISE = {
    *("mul", "add", "sub", "div", "lerp", "clamp", "neg", "abs", "square", "sign", "copy", "zero", "fill", "detach"),
    *("clone", "to", "float", "requires_grad", "data", "grad", "clamp_min", "clamp_max", "rsub", "true_divide"),
    *("truediv", "iadd", "isub", "imul", "itruediv", "radd", "rmul", "addcmul"),
}


def is_elementwise(func: Any) -> bool:
    """Return whether a function of torch commutes with splitting, by its name."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name.strip("_") in ELEMENTWISE


class UseWatch(TorchFunctionMode):
    """Function mode around the user's steps that gives them whole tensors for split parameters.

    A method's first call is watched completely, unless modules are compiled, later ones only outside of the modules
    that it calls, unless code within those needed the watch.

    Args:
        module: the user's.
        remedy: alternative to this layout, for messages.
    """

    def __init__(self, module: nn.Module, remedy: str) -> None:
        super().__init__()
        self._module, self._remedy = module, remedy
        # Method -> whether it needs the watch within modules.
        self._everywhere: dict[str, bool] = {}
        self._method = ""
        self._depth = self._pauses = 0
        # Modes above this one while it is off the stack; None: it is on.
        self._above: list[Any] | None = None

    @contextmanager
    def watching(self, method: str) -> Iterator[None]:
        """Watch a ``with`` block that runs ``method``."""
        everywhere = self._watches_everywhere(method)
        self._everywhere.setdefault(method, False)
        before, (self._depth, self._pauses) = (self._depth, self._pauses), (0, 0)
        enter = partial(self._enter, method, everywhere)
        # Compiled code would not call the hooks of modules within.
        outside = uncompiled() if everywhere else nullcontext()
        try:
            with _hooked(_outermost(self._module), enter, self._leave), outside, self:
                try:
                    yield
                finally:
                    self._resume()  # hooks do not run where a pipeline ends a stage's part of the step
        finally:
            self._depth, self._pauses = before

    def _watches_everywhere(self, method: str) -> bool:
        if method in self._everywhere:
            return self._everywhere[method]
        return all(module._compiled_call_impl is None for module in self._module.modules())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch a ``with`` block of the strategy's own code."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def _enter(self, method: str, everywhere: bool, *_: Any) -> None:
        self._depth += 1
        self._method = method
        if not everywhere and self._depth == 1:
            with _lifted(lambda mode: mode is not self) as above:
                if _get_current_function_mode() is self:
                    _pop_mode()
                    self._above = above

    def _leave(self, *_: Any) -> None:
        if self._depth == 1:
            self._resume()
        self._depth -= 1

    def _resume(self) -> None:
        if self._above is not None:
            above, self._above = self._above, None
            with _lifted(lambda mode: any(mode is each for each in above)):
                _push_mode(self)

    def _passes(self, func: Any) -> bool:
        """Return whether to run ``func`` as it is: for the strategy, for metadata, in backward."""
        return bool(self._pauses) or func in METADATA or torch._C._current_graph_task_id() != -1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on parts if that is right, else on whole tensors; raise if it writes whole values to a part."""
        kwargs = kwargs or {}
        if KeptParameter in types:
            args, kwargs = present((args, kwargs))
        return func(*args, **kwargs) if self._passes(func) else self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kinds = [self._kind(tensor) for tensor in tensors]
        split = set(kinds) - {None}
        if not split:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "").startswith("_foreach"):
            return self._one_by_one(func, args, kwargs)
        whole = [tensor for tensor, kind in zip(tensors, kinds, strict=True) if kind is None]
        if is_elementwise(func) and len(split) == 1 and all(t.dim() == 0 and not _is_trained(t) for t in whole):
            return self._on_parts(func, args, kwargs, tensors)
        if self._is_supported():
            return func(*args, **kwargs)
        if kinds[0] is not None and is_write(func):
            return self._write(func, args, kwargs, tensors)
        if self._depth:  # within a module
            self._everywhere[self._method] = True
        args, kwargs = pytree.tree_map_only(Tensor, self._gathered, (args, kwargs))
        return func(*args, **kwargs)

    def _one_by_one(self, func: Any, args: Any, kwargs: Any) -> list[Any] | None:
        """Run a function of lists on their elements, which may be split differently."""
        name = func.__name__.removeprefix("_foreach_")
        single, found = getattr(Tensor, name), []
        for index in range(len(args[0])):
            pick = lambda value, i=index: value[i] if isinstance(value, list | tuple) else value  # noqa: E731
            found.append(self._run(single, tuple(map(pick, args)), {key: pick(value) for key, value in kwargs.items()}))
        return None if name.endswith("_") else found

    def _write(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Write to a split tensor; raise if that does not commute with splitting."""
        target, *others = tensors
        given: Any = None
        if is_elementwise(func) and not any(map(_is_trained, others)):
            with suppress(RuntimeError):  # values of another shape than the whole's
                given = pytree.tree_map_only(Tensor, partial(self._like, target), (args[1:], kwargs))
        if given is not None:
            return self._on_parts(func, (args[0], *given[0]), given[1], tensors)
        raise RuntimeError(
            f"A step writes to the parameter {self._name(target)!r}, or to what it computed from it "
            f"({getattr(func, '__name__', func)}), of which each rank holds a part. Do this in a hook such as "
            f"on_after_backward or on_train_batch_end, where parameters are whole, or {self._remedy}."
        )

    def _like(self, target: Tensor, tensor: Tensor) -> Tensor:
        """Return the part of a tensor that corresponds to that of ``target``."""
        is_alike = self._kind(tensor) == self._kind(target) or tensor.dim() == 0
        return tensor if is_alike else self._part(self._gathered(tensor), target)

    def _name(self, tensor: Tensor) -> str:
        return next(
            (name for name, parameter in self._module.named_parameters() if parameter is tensor),
            f"of shape {tuple(tensor.shape)}",
        )

    def _kind(self, tensor: Tensor) -> Hashable | None:
        """Return how a tensor is split; ``None``: it is whole."""
        raise NotImplementedError

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the whole of a split tensor; others as they are."""
        raise NotImplementedError

    def _part(self, whole: Tensor, target: Tensor) -> Tensor:
        """Return the part of a whole tensor that corresponds to a split one."""
        raise NotImplementedError

    def _on_parts(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        return func(*args, **kwargs)

    def _is_supported(self) -> bool:
        """Return whether a module is running that supports split tensors."""
        return False


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


@contextmanager
def _lifted(is_above: Callable[[Any], bool]) -> Iterator[list[Any]]:
    """Take the innermost function modes for which ``is_above`` is true off the stack in a ``with`` block."""
    taken: list[Any] = []
    while (mode := _get_current_function_mode()) is not None and is_above(mode):
        taken.append(_pop_mode())
    try:
        yield taken
    finally:
        for mode in reversed(taken):
            _push_mode(mode)


@contextmanager
def _hooked(modules: Iterable[nn.Module], enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Call ``enter`` and ``leave`` around the calls of ``modules`` in a ``with`` block."""
    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a method of ``module`` usually calls."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _outermost(child)
        elif not isinstance(child, torch.jit.ScriptModule):
            yield child


class PartsWatch(UseWatch):
    """Watch of parameters that are split along the tensor or expert axis.

    Element-wise functions of equally split parameters (a momentum encoder) are computed split; what was computed so is
    gathered when it is used otherwise. Writes that are not element-wise are refused.

    Args:
        module: the user's.
        parts: name -> where it is registered and how it is split.
        owners: modules that support split parameters.
        remedy: alternative to this layout, for messages.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Mapping[str, tuple[Sequence[Slot], Cut]],
        owners: Sequence[nn.Module],
        remedy: str,
    ) -> None:
        super().__init__(module, remedy)
        self._parts, self._owners = parts, frozenset(owners)
        self._names: dict[int, str] = {}
        self._derived: Any = WeakIdKeyDictionary()

    def around(self, method: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``step`` wrapped in :meth:`watching`."""

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.watching(method):
                return step(*args, **kwargs)

        return run

    @contextmanager
    def watching(self, method: str) -> Iterator[None]:
        """See the base class; the first call, and those watched within modules, not within the owners."""
        owners = self._owners if self._watches_everywhere(method) else frozenset()
        with _hooked(owners, self._enter_owner, self._leave_owner), super().watching(method):
            yield

    def _enter_owner(self, *_: Any) -> None:
        self._pauses += 1

    def _leave_owner(self, *_: Any) -> None:
        self._pauses -= 1

    def _on_parts(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        name = next(source for tensor in tensors if (source := self._source(tensor)) is not None)
        output = func(*args, **kwargs)
        for tensor in (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)):
            self._derived[tensor] = name
        return output

    def _is_supported(self) -> bool:
        return not self._depth and self._is_within_owner()

    def _is_within_owner(self) -> bool:
        """Return whether an owner is running that the step calls itself, past the modules with hooks (``net.head(x)``).

        The stack shows it, since hooks on all owners would cost more in every step.
        """
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            if frame.f_code is _CALL and frame.f_locals["self"] in self._owners:
                return True
            frame = frame.f_back
        return False

    def _kind(self, tensor: Tensor) -> Hashable | None:
        if (name := self._source(tensor)) is None:
            return None
        cut = self._parts[name][1]
        return cut.group, cut.dim, cut.sections, tensor.shape

    def _gathered(self, tensor: Tensor) -> Tensor:
        if (name := self._source(tensor)) is None:
            return tensor
        return joined(gathered(tensor) if isinstance(tensor, DTensor) else tensor, self._parts[name][1])

    def _name(self, tensor: Tensor) -> str:
        return str(self._source(tensor))

    def _part(self, whole: Tensor, target: Tensor) -> Tensor:
        cut = self._parts[self._name(target)][1]
        return cut.part(whole.expand(cut.whole_shape(target.shape)))

    def _source(self, tensor: Tensor) -> str | None:
        """Return the name of the split parameter that a tensor is, or was computed from."""
        if isinstance(tensor, nn.Parameter) and id(tensor) not in self._names:
            # ZeRO-3 replaces parameters whenever it gathers them.
            self._names = {
                id(parameter): name
                for name, (slots, _) in self._parts.items()
                for owner, key in slots
                if (parameter := owner._parameters.get(key)) is not None
            }
        return self._derived.get(tensor) or self._names.get(id(tensor))
