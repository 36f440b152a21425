"""Detection, in the first step of a run, of split weights used as if they were whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.base.whole.parts import Slot
from trainwright.strategies.contract.cuts import METADATA, Cut
from trainwright.strategies.plan.blocks import uncompiled

# Element-wise functions, which commute with splitting.
_ELEMENTWISE = {
    *("mul", "add", "sub", "div", "lerp", "clamp", "neg", "abs", "square", "sign", "copy", "zero", "fill", "detach"),
    *("clone", "to", "float", "requires_grad", "data", "grad", "clamp_min", "clamp_max", "rsub", "true_divide"),
    *("truediv", "iadd", "isub", "imul", "itruediv", "radd", "rmul", "addcmul"),
}


class PartsWatch(TorchFunctionMode):
    """Function mode that refuses uses of split parameters outside of their modules, except element-wise ones.

    Element-wise functions of equally split parameters (a momentum encoder) are correct.

    Args:
        parts: name -> where it is registered and how it is split.
        owners: modules that support split parameters.
        remedy: alternative to this layout, for messages.
    """

    def __init__(
        self, parts: Mapping[str, tuple[Sequence[Slot], Cut]], owners: Sequence[nn.Module], remedy: str
    ) -> None:
        super().__init__()
        self._parts, self._owners, self._remedy = parts, owners, remedy
        self._names: dict[int, str] = {}
        self._derived: Any = WeakIdKeyDictionary()
        self._within = 0

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``step`` wrapped in :meth:`watching`."""

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.watching():
                return step(*args, **kwargs)

        return run

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a ``with`` block, except within calls of the owners."""
        handles: list[Any] = []
        for owner in self._owners:
            handles.append(owner.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(owner.register_forward_hook(self._leave, always_call=True))
        before, self._within = self._within, 0
        try:
            with uncompiled(), self:  # compiled code would not call the hooks of owners
                yield
        finally:
            self._within = before
            for handle in handles:
                handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch a ``with`` block of the strategy's own code."""
        self._within += 1
        try:
            yield
        finally:
            self._within -= 1

    def _enter(self, *_: Any) -> None:
        self._within += 1

    def _leave(self, *_: Any) -> None:
        self._within -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, unless its result for a part differs from that for the whole."""
        kwargs = kwargs or {}
        if self._within or func in METADATA or torch._C._current_graph_task_id() != -1:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sources = [self._source(tensor) for tensor in tensors]
        name = next((source for source in sources if source is not None), None)
        if name is None:
            return func(*args, **kwargs)
        if not self._is_elementwise(func, tensors, sources):
            raise RuntimeError(self._message(name, func))
        output = func(*args, **kwargs)
        for tensor in (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)):
            self._derived[tensor] = name
        return output

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

    def _is_elementwise(self, func: Callable[..., Any], tensors: list[Tensor], sources: list[str | None]) -> bool:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name.strip("_") not in _ELEMENTWISE:
            return False
        cuts = {(cut.group, cut.dim, cut.sections) for s in sources if s is not None for cut in [self._parts[s][1]]}
        parts = {tensor.shape for tensor, source in zip(tensors, sources, strict=True) if source is not None}
        others = all(t.dim() == 0 for t, source in zip(tensors, sources, strict=True) if source is None)
        return len(cuts) == 1 and len(parts) == 1 and others

    def _message(self, name: str, func: Any) -> str:
        return (
            f"training_step uses the parameter {name!r} outside of the module that owns it "
            f"({getattr(func, '__name__', func)}), and this rank holds a part of it. Do this in a hook such as "
            f"on_after_backward or on_train_batch_end, where parameters are whole, use the optimizer's weight_decay "
            f"instead of a penalty, or {self._remedy}."
        )
