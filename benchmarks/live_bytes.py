"""Byte count of all live tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Watches every operation and remembers the storages of its inputs and outputs for as long as they live.

    A storage counts with the size that it has now: FSDP2 frees gathered parameters by resizing theirs to nothing.

    Args:
        known: tensors that exist already.
        ignored: tensors that do not count.
    """

    def __init__(self, known: Iterable[Tensor] = (), ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._ignored = WeakIdKeyDictionary({tensor.untyped_storage(): None for tensor in ignored})
        self._storages = WeakIdKeyDictionary()
        self.peak = 0
        for tensor in known:
            self._remember(tensor)
        self.peak = self.now()

    def now(self) -> int:
        """Bytes of all tensors that are alive and have been seen."""
        return sum(storage.nbytes() for storage in self._storages)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        # Adding up all storages takes longer than most operations: only where there may be more than before. FSDP2
        # gives memory back to storages that it has taken it from, before operators of these two.
        is_more = func.namespace in ("fsdp", "c10d") or func.__name__.startswith(("resize", "set_"))
        for leaf in tree_leaves((args, kwargs, output)):
            if isinstance(leaf, Tensor):
                is_more |= self._remember(leaf)
        if is_more:
            self.peak = max(self.peak, self.now())
        return output

    def _remember(self, tensor: Tensor) -> bool:
        """Record a storage and return whether it is new."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        # Fake tensors have another device than their storage.
        if storage.device.type == "meta" or storage in self._storages or storage in self._ignored:
            return False
        self._storages[storage] = None
        return True
