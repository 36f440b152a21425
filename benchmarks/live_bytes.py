"""Counts the bytes of all tensors that are alive, whoever made them."""

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
        for leaf in tree_leaves((args, kwargs, output)):
            if isinstance(leaf, Tensor):
                self._remember(leaf)
        self.peak = max(self.peak, self.now())
        return output

    def _remember(self, tensor: Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != "meta" and local.untyped_storage() not in self._ignored:
            self._storages[local.untyped_storage()] = None
