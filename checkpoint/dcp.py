"""How ``torch.distributed.checkpoint`` writes and reads a run state: tensors as safetensors files, metadata as JSON.

DCP plans who writes which box and what a rank must read for the boxes it holds; torch's own storage would keep that
plan as a pickle, which runs whatever somebody put into it. Here it is ``tensors.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.manifest import FileRecord
from trainwright.checkpoint.parts import TensorParts
from trainwright.checkpoint.storage import PendingFolder
from trainwright.checkpoint.tensor_file import TensorEntry, TensorFileWriter

TENSORS = "tensors.json"


@dataclass(frozen=True)
class StoredBox:
    """Where one box of a tensor is kept: which box, in which file, under which name."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    name: str


@dataclass(frozen=True)
class StoredMetadata:
    """What ``tensors.json`` says of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[StoredBox, ...]


class PartsSavePlanner(DefaultSavePlanner):
    """DCP's planner for flat mappings from keys to :class:`TensorParts`; a box that several hold is written by one."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor of a box."""
        return self.state_dict[index.fqn].part_at(index.offset)


class PartsLoadPlanner(DefaultLoadPlanner):
    """As :class:`PartsSavePlanner`, for reading into the boxes in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the boxes as they are: torch's own makes None of what is no tensor, on its way to fill meta tensors."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor of a box."""
        parts: TensorParts = self.state_dict[index.fqn]
        return parts.part_at(index.offset)


class RunStateWriter(StorageWriter):
    """Writes this rank's boxes into one file of a folder that nobody sees yet; the first rank then publishes it.

    Args:
        pending: the folder.
        rank: this rank.
        publish: called on the first rank with the files of all ranks, once all are written.
        room: called on the first rank with the bytes of all tensors, before any is written.
    """

    def __init__(
        self,
        pending: PendingFolder,
        rank: int,
        publish: Callable[[list[FileRecord], Mapping[str, StoredMetadata]], None],
        room: Callable[[int], None],
    ) -> None:
        self._pending = pending
        self._rank = rank
        self._publish = publish
        self._room = room

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to forget: a writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are, if there is room."""
        self._room(sum(item.tensor_storage_size() or 0 for plan in plans for item in plan.items))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, tensor after tensor, and hand back its record with the first result."""
        results = _write_file(self._pending, self._rank, plan.items, planner) if plan.items else []
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Collect the records of all ranks and publish."""
        records = [rank[0].storage_data[0] for rank in results if rank]
        places = {result.index: result.storage_data[1:] for rank in results for result in rank}
        stored = {
            key: StoredMetadata(
                tuple(tensor.size),
                tensor.properties.dtype,
                tuple(
                    StoredBox(tuple(chunk.offsets), tuple(chunk.sizes), *places[MetadataIndex(key, chunk.offsets)])
                    for chunk in tensor.chunks
                ),
            )
            for key, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        self._publish(records, stored)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether DCP may make one from a path alone: no."""
        return False

    def storage_meta(self) -> StorageMeta | None:
        """None is needed."""
        return None


def _write_file(
    pending: PendingFolder, rank: int, items: Sequence[WriteItem], planner: SavePlanner
) -> list[WriteResult]:
    # Widest dtypes first, so that every tensor begins at a multiple of its element's size and can be mapped.
    items = sorted(items, key=lambda item: -_data(item).properties.dtype.itemsize)
    names, entries = [], []
    for item in items:
        name = _name_of(item)
        names.append(name)
        entries.append(TensorEntry(name, _data(item).properties.dtype, tuple(_data(item).chunk.sizes)))
    file = pending.create_file(f"rank_{rank:05d}.safetensors", rank)
    try:
        writer = TensorFileWriter(file, entries)
        for item, name in zip(items, names, strict=True):
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            writer.write(name, tensor.detach())
        writer.close()
    except BaseException:
        file.abort()
        raise
    record = file.close()
    kept = [(record if position == 0 else None, record.name, name) for position, name in enumerate(names)]
    return [
        WriteResult(item.index, item.tensor_storage_size() or 0, place) for item, place in zip(items, kept, strict=True)
    ]


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _name_of(item: WriteItem) -> str:
    """Name of a box in its file: the key alone for a tensor that is one box."""
    is_whole = _data(item).chunk.sizes == _data(item).size
    offsets = ",".join(map(str, item.index.offset or ()))
    return item.index.fqn if is_whole else f"{item.index.fqn}@{offsets}"


# ---- tensors.json ---------------------------------------------------------------------------------------------------


def to_json(stored: Mapping[str, StoredMetadata]) -> bytes:
    """``tensors.json``: key -> dtype, shape and boxes ``[offsets, sizes, file, name]``."""
    plain = {
        key: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "boxes": [[list(box.offsets), list(box.sizes), box.file, box.name] for box in tensor.boxes],
        }
        for key, tensor in sorted(stored.items())
    }
    return json.dumps({"tensors": plain}, separators=(",", ":")).encode()


def from_json(data: bytes, files: Mapping[str, Any], path: str) -> dict[str, StoredMetadata]:
    """What :func:`to_json` was given.

    Args:
        data: contents of ``tensors.json``.
        files: the files that the manifest names; a box may be in no other.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if something is not as it must be.
    """
    try:
        plain = json.loads(data)["tensors"]
        stored = {key: _metadata(entry) for key, entry in plain.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}/{TENSORS} cannot be understood: {error!r}.") from error
    for key, tensor in stored.items():
        problem = _problem_of(tensor, files)
        if problem is not None:
            raise CheckpointError(f"{path}/{TENSORS}: {key} of shape {tensor.shape} {problem}.")
    return stored


def _metadata(entry: dict[str, Any]) -> StoredMetadata:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']} is no dtype")
    boxes = tuple(
        StoredBox(tuple(map(int, offsets)), tuple(map(int, sizes)), str(file), str(name))
        for offsets, sizes, file, name in entry["boxes"]
    )
    return StoredMetadata(tuple(map(int, entry["shape"])), dtype, boxes)


def _problem_of(tensor: StoredMetadata, files: Mapping[str, Any]) -> str | None:
    for box in tensor.boxes:
        if box.file not in files:
            return f"is said to be in {box.file!r}, no file of the manifest"
        ends = zip(box.offsets, box.sizes, tensor.shape, strict=False)
        fits = all(min(offset, size) >= 0 and offset + size <= length for offset, size, length in ends)
        if not fits or not len(box.offsets) == len(box.sizes) == len(tensor.shape):
            return f"cannot have a box at {box.offsets} of {box.sizes}"
    held, all_of_it = sum(math.prod(box.sizes) for box in tensor.boxes), math.prod(tensor.shape)
    return None if held == all_of_it else f"is there with {held} of its {all_of_it} elements"


class RunStateReader(StorageReader):
    """Gives DCP what a published checkpoint holds.

    Args:
        stored: contents of ``tensors.json``.
        read: reads a box of a stored box: file, name, offsets and sizes within it.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredMetadata],
        read: Callable[[str, str, Sequence[int], Sequence[int]], Tensor],
    ) -> None:
        self._stored = stored
        self._read = read
        self._places = {MetadataIndex(k, b.offsets): b for k, tensor in stored.items() for b in tensor.boxes}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to forget."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The stored boxes in DCP's form."""
        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in tensor.boxes],
                )
                for key, tensor in self._stored.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the boxes that this rank holds, file after file."""
        wanted = [(self._places[item.storage_index], item) for item in plan.items]
        for place, item in sorted(wanted, key=lambda pair: (pair[0].file, pair[0].name)):
            value = self._read(place.file, place.name, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether DCP may make one from a path alone: no."""
        return False
