"""Where whole or partial tensors can be read from by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor


class TensorSource(Protocol):
    """Named tensors that are read in parts, so that no rank reads more than it keeps."""

    def keys(self) -> Collection[str]:
        """Names of all tensors."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor.

        Raises:
            KeyError: if there is no such tensor.
        """

    def dtype(self, key: str) -> torch.dtype:
        """Its dtype."""

    def read(self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """The box ``[offsets, offsets + sizes)`` of a tensor, contiguous, on the CPU, in memory of its own.

        Args:
            key: name of the tensor.
            offsets: where the box begins in each tensor dimension; ``None``: at 0.
            sizes: its length in each tensor dimension; ``None``: to the end.
        """
