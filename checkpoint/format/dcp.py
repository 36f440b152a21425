"""Reading of run states by ``torch.distributed.checkpoint``: tensors from safetensors files, metadata from JSON.

DCP plans which parts of which boxes a rank reads. Its own storage keeps metadata as a pickle, which can run code; here
it is ``tensors.json``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainwright.checkpoint.format.boxes import StoredBox, StoredMetadata, plain_from_json, problem_of_boxes
from trainwright.checkpoint.format.dtypes import dtype_named
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.records import TENSORS
from trainwright.checkpoint.store.paths import join_path
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import interpreting

# Ranks read independently; DCP would warn of that at every load.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class PartsLoadPlanner(DefaultLoadPlanner):
    """DCP planner for flat mappings from keys to :class:`TensorParts`, loaded in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the state dict as it is: torch's method replaces non-tensors by None while filling meta tensors."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor of a box."""
        parts: TensorParts = self.state_dict[index.fqn]
        return parts.part_at(index.offset)


# ---- tensors.json ---------------------------------------------------------------------------------------------------


def to_json(stored: Mapping[str, StoredMetadata]) -> bytes:
    """Return ``tensors.json``: key -> dtype, shape and boxes ``[offsets, sizes, file, name]``."""
    plain = {
        key: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "boxes": [[list(box.offsets), list(box.sizes), box.file, box.name] for box in tensor.boxes],
        }
        for key, tensor in sorted(stored.items())
    }
    return json.dumps({"tensors": plain}, separators=(",", ":")).encode()


def from_json(data: bytes, files: Mapping[str, Any], path: str) -> dict[str, StoredMetadata]:
    """Parse the output of :func:`to_json`.

    Args:
        data: contents of ``tensors.json``.
        files: files of the manifest; a box may be in no other.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if it is malformed or inconsistent.
    """
    with interpreting(join_path(path, TENSORS)):
        stored = plain_from_json(data)
        for key, tensor in stored.items():
            dtype_named(tensor.dtype)
            problem = problem_of_boxes(tensor.shape, tensor.boxes, files)
            if problem is not None:
                raise CheckpointError(f"{path}/{TENSORS}: {key} of shape {tensor.shape} {problem}.")
    return stored


class RunStateReader(StorageReader):
    """DCP storage reader of a published checkpoint.

    Args:
        stored: contents of ``tensors.json``.
        read: reads a part of a stored box, given its dtype, and offsets and sizes within it.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredMetadata],
        read: Callable[[StoredBox, torch.dtype, Sequence[int], Sequence[int]], Tensor],
    ) -> None:
        self._stored = stored
        self._read = read
        self._places = {MetadataIndex(k, b.offsets): b for k, tensor in stored.items() for b in tensor.boxes}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the stored boxes as DCP metadata."""
        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(dtype=dtype_named(tensor.dtype)),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in tensor.boxes],
                )
                for key, tensor in self._stored.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the boxes of this rank, file by file."""
        wanted = [(self._places[item.storage_index], item) for item in plan.items]
        for place, item in sorted(wanted, key=lambda pair: (pair[0].file, pair[0].name)):
            dtype = dtype_named(self._stored[item.storage_index.fqn].dtype)
            value = self._read(place, dtype, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: a path alone does not make a reader."""
        return False
