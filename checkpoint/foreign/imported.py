"""What imports have in common: foreign values in the form of a checkpoint's content."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.tree import encode, encode_what_can_be, reference
from trainwright.core.errors import CheckpointError
from trainwright.core.text.sizes import size_text

_MOST_EXPANDED = 1 << 30
_SECTIONS = {"state_dict": "weights", "current_model_state": "current_weights"}
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


class StreamedTensor(TensorParts):
    """A whole tensor that is read when it is written, and held by nobody.

    Args:
        shape: its shape.
        dtype: its dtype.
        read: gives the tensor, on the CPU.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        # Says shape and bytes to who plans the writing.
        stand_in = torch.empty(tuple(shape), dtype=dtype, device="meta")
        super().__init__(shape, dtype, [((0,) * len(tuple(shape)), stand_in)])
        self._read = read

    def part_at(self, offsets: Sequence[int] | None) -> Tensor:
        """The whole tensor, read now."""
        super().part_at(offsets)
        return self._read()


class Encoder:
    """Makes the tree of a checkpoint from loaded values.

    Attributes:
        tensors: what the tree refers to, by key.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, TensorParts] = {}
        self._first: dict[tuple[Any, ...], str] = {}

    def entry(self, key: str, value: Any) -> Any:
        """Take one entry of Lightning's dict of a run."""
        if key in _SECTIONS:
            return self.weights(value, _SECTIONS[key])
        if key in _HYPER_PARAMETERS:
            return self.hyper_parameters(value, key)
        return encode(value, self.put, key)

    def put(self, path: str, tensor: Tensor) -> str:
        """Take a tensor that is no weight."""
        key = f"tree/{path}"
        self.tensors[key] = TensorParts.whole(_with_values(path, tensor.detach()))
        return key

    def weights(self, state: Mapping[str, Any], section: str) -> dict[str, Any]:
        """Take a ``state_dict``; names of one tensor share a key."""
        tree: dict[str, Any] = {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                tree[name] = encode(value, self.put, f"{section}/{name}")
                continue
            value = _with_values(name, value.detach())
            memory = (section, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
            # A tensor without elements has no memory of its own.
            key = self._first.setdefault(memory, f"{section}/{name}") if value.numel() else f"{section}/{name}"
            self.tensors.setdefault(key, TensorParts.whole(value))
            tree[name] = reference(key)
        return tree

    def hyper_parameters(self, values: Any, section: str) -> Any:
        """Take what a module was made with; what a checkpoint cannot hold is left out with a warning."""
        if isinstance(values, Namespace):
            values = vars(values)
        if not isinstance(values, dict):
            return encode(values, self.put, section)
        tree, left_out = encode_what_can_be(values, self.put, section)
        if left_out:
            warnings.warn(
                f"The hyper-parameters {', '.join(left_out)} are left out, since a checkpoint holds plain values. Give "
                "them to load_from_checkpoint(path, name=value) again.",
                stacklevel=2,
            )
        return tree


def _with_values(path: str, tensor: Tensor) -> Tensor:
    """``tensor``, whose values are all there.

    Raises:
        CheckpointError: if it has none (a meta tensor) or not one per element (a sparse one), or if a few bytes stand
            for so many elements that nobody can have meant to write them.
    """
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain:
        raise CheckpointError(
            f"{path} is a tensor on {tensor.device} of the layout {tensor.layout}, which a checkpoint cannot hold. "
            "Save it as a dense tensor of the CPU."
        )
    size = tensor.numel() * tensor.element_size()
    if size > max(_MOST_EXPANDED, 16 * tensor.untyped_storage().nbytes()):
        raise CheckpointError(
            f"{path} of shape {tuple(tensor.shape)} would take {size_text(size)}, of which "
            f"{size_text(tensor.untyped_storage().nbytes())} are there. Save it before it is expanded."
        )
    return tensor


def about(kind: str, step: Any = 0, epoch: Any = 0) -> dict[str, Any]:
    """What the manifest of an import says.

    Args:
        kind: ``"run state"`` or ``"weights"``.
        step: optimizer steps done.
        epoch: epochs done.
    """
    return {
        "kind": kind,
        "step": int(step),
        "epoch": int(epoch),
        "world_size": 1,
        "data_ranks": 1,
        "layout": {},
        "strategy": "import",
        "versions": {name: version(name) for name in ("trainwright", "torch")},
        "metrics": {},
    }
