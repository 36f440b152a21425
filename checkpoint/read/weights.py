"""The weights of a checkpoint under the names that its module gave them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from trainwright.checkpoint.read.run_state import RunState, StoredTensor
from trainwright.core.errors import CheckpointError


class SavedWeights:
    """A ``TensorSource`` of a run state's weights; tied ones have all their names.

    Args:
        state: the checkpoint.

    Raises:
        CheckpointError: if it holds no weights.
    """

    def __init__(self, state: RunState) -> None:
        saved = state.tree.get("state_dict")
        if not isinstance(saved, dict):
            raise CheckpointError(f"{state.path} holds no weights (no state_dict); give another checkpoint.")
        self._state = state
        self._key_of = {name: value.key for name, value in saved.items() if isinstance(value, StoredTensor)}
        self._values = {name: value for name, value in saved.items() if isinstance(value, Tensor)}

    def keys(self) -> Collection[str]:
        """Names in the module."""
        return [*self._key_of, *self._values]

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor; :class:`KeyError` if there is none of that name."""
        return tuple(self._values[key].shape) if key in self._values else self._state.shape(self._key_of[key])

    def dtype(self, key: str) -> torch.dtype:
        """Its dtype; :class:`KeyError` if there is none of that name."""
        return self._values[key].dtype if key in self._values else self._state.dtype(self._key_of[key])

    def read(self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """A box of a tensor, see :meth:`~trainwright.checkpoint.format.source.TensorSource.read`."""
        if key in self._values:
            return self._values[key].clone()  # a number, which is kept beside the tensors
        return self._state.read(self._key_of[key], offsets, sizes)
