"""The file of tensors that a rank writes, and where in such files the boxes of a checkpoint are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainwright.checkpoint.dcp import StoredBox, StoredMetadata
from trainwright.checkpoint.dealing import Deal
from trainwright.checkpoint.parts import TensorParts
from trainwright.checkpoint.records import FileRecord
from trainwright.checkpoint.storage import PendingFolder
from trainwright.checkpoint.tensor_file import TensorEntry, TensorFileWriter


def file_of(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def write_parts(pending: PendingFolder, rank: int, tensors: Mapping[str, TensorParts]) -> FileRecord:
    """Write boxes into this rank's file, tensor after tensor.

    Args:
        pending: the folder, which nobody sees yet.
        rank: this rank.
        tensors: the boxes, by key; one at least.

    Raises:
        CheckpointError: if they could not be written.
    """
    boxes = [(held, offsets, box.shape, key) for key, held in tensors.items() for offsets, box in held.parts]
    # Widest dtypes first, so that every tensor begins at a multiple of its element's size and can be mapped.
    boxes.sort(key=lambda box: -box[0].dtype.itemsize)
    names = [_name_of(key, offsets, sizes, held.shape) for held, offsets, sizes, key in boxes]
    entries = [
        TensorEntry(name, held.dtype, tuple(sizes)) for name, (held, _, sizes, _) in zip(names, boxes, strict=True)
    ]
    file = pending.create_file(file_of(rank), rank)
    try:
        writer = TensorFileWriter(file, entries)
        for name, (held, offsets, _, _) in zip(names, boxes, strict=True):
            writer.write(name, held.part_at(offsets).detach())  # of an import it is read here, one at a time
        writer.close()
    except BaseException:
        file.abort()
        raise
    return file.close()


def stored_by(deal: Deal) -> dict[str, StoredMetadata]:
    """Where each box is once all ranks have written what they were dealt; on the first rank."""
    boxes: dict[str, list[StoredBox]] = {}
    wholes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for box, rank in deal.written():
        name = _name_of(box.key, box.offsets, box.sizes, box.shape)
        boxes.setdefault(box.key, []).append(StoredBox(box.offsets, box.sizes, file_of(rank), name))
        wholes[box.key] = box.shape, getattr(torch, box.dtype)
    return {
        key: StoredMetadata(*wholes[key], tuple(sorted(found, key=lambda box: box.offsets)))
        for key, found in boxes.items()
    }


def _name_of(key: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """Name of a box in its file: the key alone for a tensor that is one box."""
    return key if tuple(sizes) == tuple(shape) else f"{key}@{','.join(map(str, offsets))}"
