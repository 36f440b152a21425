"""Which storages there are from when to when, counted while operations of torch run, with memory or without."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary


class _Seen:
    """A storage that is alive: its bytes, what it belongs to, and what tells when it is gone."""

    __slots__ = ("phase", "reference", "size")

    def __init__(self, reference: Any, phase: Any, size: int) -> None:
        self.reference, self.phase, self.size = reference, phase, size


class LiveCounter(TorchDispatchMode):
    """Watches every operation, and knows which storages there are from when to when.

    Attributes:
        now: bytes alive.
        peak: most bytes alive since :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, _Seen] = {}
        self._ignored = WeakIdKeyDictionary()
        self._stack = contextlib.ExitStack()
        self.now = 0
        self.peak = 0

    phase: Any = None
    """What storages that are made now belong to."""

    def __enter__(self) -> Any:
        self._stack.enter_context(_resizing_told(self._on_resized))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def alive(self) -> dict[Any, int]:
        """Bytes alive by the phase that made them."""
        found: dict[Any, int] = {}
        for seen in list(self._seen.values()):
            found[seen.phase] = found.get(seen.phase, 0) + seen.size
        return found

    def reset_peak(self) -> None:
        """Look for the most from here on."""
        self.peak = self.now

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Leave out tensors that are there anyway."""
        for tensor in tensors:
            self._ignored[tensor.untyped_storage()] = None

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Count tensors that are there already."""
        for tensor in tensors:
            self._see(tensor)

    def _see(self, tensor: Tensor) -> bool:
        """Take note of a tensor; whether there is more than before."""
        storage = local(tensor).untyped_storage()
        key = id(storage)
        if key in self._seen:
            return self._resized(storage)
        if storage in self._ignored:
            return False
        size = storage.nbytes()
        self._seen[key] = _Seen(weakref.ref(storage, lambda _: self._on_gone(key)), self.phase, size)
        self.now += size
        return True

    def _resized(self, storage: torch.UntypedStorage) -> bool:
        seen, size = self._seen[id(storage)], storage.nbytes()
        more, seen.size = size - seen.size, size
        self.now += more
        return more > 0

    def _on_resized(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._seen and self._resized(storage):
            self._notice(self.now)

    def _on_gone(self, key: int) -> None:
        self.now -= self._seen.pop(key).size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        is_more = False
        for leaf in pytree.tree_leaves(output):
            is_more |= isinstance(leaf, Tensor) and self._see(leaf)
        if is_more:
            self._notice(self.now)
        self._count(func, args, kwargs, output)
        return output

    def _notice(self, now: int) -> None:
        """There is more than before."""
        self.peak = max(self.peak, now)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """What else is counted of an operation: nothing."""


@contextlib.contextmanager
def _resizing_told(listener: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Tell of every storage that is resized: FSDP2 takes and gives memory so, which is no operation of torch."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        found = resize(storage, size)
        listener(storage)
        return found

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that is split over ranks (a ``DTensor``); any other tensor itself."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found
