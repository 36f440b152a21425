"""A rank's tensor file, and the index of the boxes in these files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch

from trainwright.checkpoint.format.boxes import StoredBox
from trainwright.checkpoint.format.dcp import StoredMetadata
from trainwright.checkpoint.format.directory import BoxPlace, Directory, Entry, in_runs
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.records import FileRecord, file_of
from trainwright.checkpoint.format.tensor_file import TensorEntry, TensorFileWriter
from trainwright.checkpoint.store.storage import PendingFolder
from trainwright.checkpoint.write.dealing import Deal, WriterKin, is_own, own_boxes
from trainwright.core.errors import CheckpointError


def write_parts(pending: PendingFolder, rank: int, tensors: Mapping[str, TensorParts]) -> FileRecord:
    """Write boxes into this rank's file, one tensor at a time.

    Args:
        pending: the unpublished folder.
        rank: this rank.
        tensors: the boxes, by key; at least one.

    Raises:
        CheckpointError: if writing fails.
    """
    boxes = [(held, offsets, box.shape, key) for key, held in tensors.items() for offsets, box in held.parts]
    # Widest dtypes first, so that every tensor is aligned to its element size.
    boxes.sort(key=lambda box: -box[0].dtype.itemsize)
    names = [name_of(key, offsets, sizes, held.shape) for held, offsets, sizes, key in boxes]
    entries = [
        TensorEntry(name, held.dtype, tuple(sizes)) for name, (held, _, sizes, _) in zip(names, boxes, strict=True)
    ]
    file = pending.create_file(file_of(rank), rank)
    try:
        writer = TensorFileWriter(file, entries)
        for name, (held, offsets, _, _) in zip(names, boxes, strict=True):
            writer.write(name, held.part_at(offsets).detach())  # reads lazy tensors of imports one at a time
        writer.close()
    except BaseException:
        file.abort()
        raise
    return file.close()


def stored_by(deal: Deal) -> dict[str, StoredMetadata]:
    """Return the location of each box after all ranks have written; on the first rank."""
    boxes: dict[str, list[StoredBox]] = {}
    wholes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for box, rank in deal.written():
        name = name_of(box.key, box.offsets, box.sizes, box.shape)
        boxes.setdefault(box.key, []).append(StoredBox(box.offsets, box.sizes, file_of(rank), name))
        wholes[box.key] = box.shape, getattr(torch, box.dtype)
    return {
        key: StoredMetadata(*wholes[key], tuple(sorted(found, key=lambda box: box.offsets)))
        for key, found in boxes.items()
    }


def led_boxes(deal: Deal) -> bytes:
    """Return this rank's box file: all boxes of the groups that it leads, ``key -> [[offsets, sizes, rank]]``.

    Boxes that other groups hold too are in the files of all of them, so that a resuming rank finds its own in one file.
    """
    found: dict[str, set[tuple[tuple[int, ...], tuple[int, ...], int]]] = {}
    for number, kin in deal.led.items():
        written = [(box, rank) for box, rank in deal.written_by(number, kin) if box not in deal.common]
        common = [(box, deal.common[box]) for box in kin.boxes if box in deal.common]
        for box, rank in (*written, *common):
            found.setdefault(box.key, set()).add((box.offsets, box.sizes, rank))
    plain = {key: sorted(boxes) for key, boxes in sorted(found.items())}
    return json.dumps({"tensors": plain}, separators=(",", ":")).encode()


def directory_of(deal: Deal) -> Directory:
    """Return all tensors, and which box files locate each; on the first rank.

    Raises:
        CheckpointError: if the ranks together do not hold a whole tensor.
    """
    assert deal.split is not None
    entries: dict[str, Entry] = {}
    places: dict[str, dict[int, BoxPlace]] = {}
    held: dict[str, int] = {}
    for number, kin in enumerate(deal.kins):
        file = deal.split.boxes_of(number)
        for box in kin.boxes:
            if is_own(box):
                continue
            entries.setdefault(box.key, Entry(box.dtype, box.shape))
            known = places.setdefault(box.key, {})
            known[file] = _with_box(known.get(file), file, box.offsets, box.sizes)
            if deal.winners.get(box, number) == number:
                held[box.key] = held.get(box.key, 0) + math.prod(box.sizes)
    for key, entry in entries.items():
        if held[key] != math.prod(entry.shape):
            raise CheckpointError(
                f"{key} of shape {entry.shape}, as sharded over the ranks, has only {held[key]} of its "
                f"{math.prod(entry.shape)} elements."
            )
    tensors = {
        key: Entry(entry.dtype, entry.shape, tuple(sorted(places[key].values()))) for key, entry in entries.items()
    }
    return Directory(tensors, *_owned(deal.kins, deal.split.num_ranks))


def _with_box(place: BoxPlace | None, file: int, offsets: Sequence[int], sizes: Sequence[int]) -> BoxPlace:
    begin, end = tuple(offsets), tuple(offset + size for offset, size in zip(offsets, sizes, strict=True))
    if place is None:
        return BoxPlace(file, begin, end)
    return BoxPlace(file, tuple(map(min, place.begin, begin)), tuple(map(max, place.end, end)))


def _owned(kins: Sequence[WriterKin], ranks: int) -> tuple[list[Mapping[str, Entry]], list[tuple[int, int]]]:
    """Return the sets of rank-local tensors, and the run-length encoding of which ranks have which."""
    numbers: dict[tuple[tuple[str, str, tuple[int, ...]], ...], int] = {}
    of_rank = [0] * ranks
    for kin in kins:
        kind = tuple((name, box.dtype, box.shape) for name, box in own_boxes(kin))
        number = numbers.setdefault(kind, len(numbers))
        for rank in kin.ranks:
            of_rank[rank] = number
    return [{name: Entry(dtype, shape) for name, dtype, shape in kind} for kind in numbers], in_runs(of_rank)


def name_of(key: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """Return the name of a box in its file: the key itself if the box is the whole tensor."""
    return key if tuple(sizes) == tuple(shape) else f"{key}@{','.join(map(str, offsets))}"
