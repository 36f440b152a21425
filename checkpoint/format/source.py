"""Protocol of readers of named tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor


class TensorSource(Protocol):
    """Named tensors that can be read in parts, so that a rank reads only what it keeps."""

    def keys(self) -> Collection[str]:
        """Return the names of all tensors."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor.

        Raises:
            KeyError: if there is no such tensor.
        """

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""

    def read(self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the box ``[offsets, offsets + sizes)`` of a tensor as a new contiguous CPU tensor.

        Args:
            key: name of the tensor.
            offsets: begin of the box in each dim; ``None``: 0.
            sizes: of the box in each dim; ``None``: to the end.
        """
