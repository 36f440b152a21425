"""Uses of split weights by the user's step outside of the modules that support them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.core.torch_internals import _get_current_function_mode, _pop_mode, _push_mode
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.base.kept_parameters import KeptParameter, present
from trainwright.strategies.base.whole.gathered import gathered, is_write, joined
from trainwright.strategies.contract.cuts import METADATA, Cut
from trainwright.strategies.plan.blocks import uncompiled
from trainwright.strategies.plan.slots import Slot

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
    return name.removeprefix("_foreach").strip("_") in ELEMENTWISE


class UseWatch(TorchFunctionMode):
    """Function mode around the user's steps that gives them whole tensors for split parameters.

    A method's first call is watched completely, unless modules are compiled, later ones only outside of the modules
    that it calls, unless code within those needed the watch.

    Args:
        module: the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        # Method -> whether it needs the watch within modules.
        self._everywhere: dict[str, bool] = {}
        self._method = ""
        self._depth = self._pauses = 0
        self._is_popped = False

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
        if not everywhere and self._depth == 1 and _get_current_function_mode() is self:
            _pop_mode()
            self._is_popped = True

    def _leave(self, *_: Any) -> None:
        if self._depth == 1:
            self._resume()
        self._depth -= 1

    def _resume(self) -> None:
        if self._is_popped:
            _push_mode(self)
            self._is_popped = False

    def _has_gathered(self) -> None:
        """Record a gather, within a module or not."""
        if self._depth:
            self._everywhere[self._method] = True

    def _passes(self, func: Any) -> bool:
        """Return whether to run ``func`` as it is: for the strategy, for metadata, in backward."""
        return bool(self._pauses) or func in METADATA or torch._C._current_graph_task_id() != -1


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
        super().__init__(module)
        self._parts, self._owners, self._remedy = parts, frozenset(owners), remedy
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on parts if that is right, else on whole tensors; raise if it writes to a part."""
        kwargs = kwargs or {}
        if KeptParameter in types:
            args, kwargs = present((args, kwargs))
        if self._passes(func):
            return func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sources = [self._source(tensor) for tensor in tensors]
        name = next((source for source in sources if source is not None), None)
        if name is None:
            return func(*args, **kwargs)
        if not self._is_elementwise(func, args, tensors, sources):
            if not self._depth and self._is_within_owner():
                return func(*args, **kwargs)
            if is_write(func):
                raise RuntimeError(self._message(name, func))
            self._has_gathered()
            args, kwargs = pytree.tree_map_only(Tensor, self._gathered, (args, kwargs))
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        for tensor in (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)):
            self._derived[tensor] = name
        return output

    def _is_within_owner(self) -> bool:
        """Return whether an owner is running that the step calls itself, past the modules with hooks (``net.head(x)``).

        The stack shows it, since hooks on all owners would cost more in every step.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is _CALL and frame.f_locals["self"] in self._owners:
                return True
            frame = frame.f_back
        return False

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the whole of a part; other tensors as they are."""
        name = self._source(tensor)
        if name is None:
            return tensor
        if isinstance(tensor, DTensor):
            tensor = gathered(tensor)
        return joined(tensor, self._parts[name][1])

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
        found: str | None = self._derived.get(tensor) or self._names.get(id(tensor))
        return found

    def _is_elementwise(
        self, func: Callable[..., Any], args: Any, tensors: list[Tensor], sources: list[str | None]
    ) -> bool:
        if not is_elementwise(func):
            return False
        if getattr(func, "__name__", "").startswith("_foreach"):
            return all(tensor.dim() == 0 for tensor in tensors[len(args[0]) :])
        cuts = {(cut.group, cut.dim, cut.sections) for s in sources if s is not None for cut in [self._parts[s][1]]}
        parts = {tensor.shape for tensor, source in zip(tensors, sources, strict=True) if source is not None}
        others = all(t.dim() == 0 for t, source in zip(tensors, sources, strict=True) if source is None)
        return len(cuts) == 1 and len(parts) == 1 and others

    def _message(self, name: str, func: Any) -> str:
        return (
            f"A step writes to the parameter {name!r} ({getattr(func, '__name__', func)}), and this rank holds a part "
            f"of it. Do this in a hook such as on_after_backward or on_train_batch_end, where parameters are whole, or "
            f"{self._remedy}."
        )
