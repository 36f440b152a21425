"""Index of the boxes in the tensor files of all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from trainwright.checkpoint.format.boxes import StoredBox, StoredMetadata
from trainwright.checkpoint.format.directory import BoxPlace, Directory, Entry, in_runs
from trainwright.checkpoint.format.records import file_of
from trainwright.checkpoint.write.assignment import Assignment, ReplicaGroup, is_own, own_boxes
from trainwright.core.errors import CheckpointError


def stored_by(assignment: Assignment) -> dict[str, StoredMetadata]:
    """Return the location of each box after all ranks have written; on the first rank."""
    boxes: dict[str, list[StoredBox]] = {}
    wholes: dict[str, tuple[tuple[int, ...], str]] = {}
    for box, rank in assignment.written():
        name = name_of(box.key, box.offsets, box.sizes, box.shape)
        boxes.setdefault(box.key, []).append(StoredBox(box.offsets, box.sizes, file_of(rank), name))
        wholes[box.key] = box.shape, box.dtype
    return {
        key: StoredMetadata(*wholes[key], tuple(sorted(found, key=lambda box: box.offsets)))
        for key, found in boxes.items()
    }


def led_box_file(assignment: Assignment) -> bytes:
    """Return this rank's box file: all boxes of the groups that it leads, ``key -> [[offsets, sizes, rank]]``.

    Boxes that other groups hold too are in the files of all of them, so that a resuming rank finds its own in one file.
    """
    found: dict[str, set[tuple[tuple[int, ...], tuple[int, ...], int]]] = {}
    for number, replicas in assignment.led.items():
        written = [(box, rank) for box, rank in assignment.written_by(number, replicas) if box not in assignment.common]
        common = [(box, assignment.common[box]) for box in replicas.boxes if box in assignment.common]
        for box, rank in (*written, *common):
            found.setdefault(box.key, set()).add((box.offsets, box.sizes, rank))
    plain = {key: sorted(boxes) for key, boxes in sorted(found.items())}
    return json.dumps({"tensors": plain}, separators=(",", ":")).encode()


def directory_of(assignment: Assignment) -> Directory:
    """Return all tensors, and which box files locate each; on the first rank.

    Raises:
        CheckpointError: if the ranks together do not hold a whole tensor.
    """
    assert assignment.split is not None
    entries: dict[str, Entry] = {}
    places: dict[str, dict[int, BoxPlace]] = {}
    held: dict[str, int] = {}
    for number, replicas in enumerate(assignment.groups):
        file = assignment.split.boxes_of(number)
        for box in replicas.boxes:
            if is_own(box):
                continue
            entries.setdefault(box.key, Entry(box.dtype, box.shape))
            known = places.setdefault(box.key, {})
            known[file] = _with_box(known.get(file), file, box.offsets, box.sizes)
            if assignment.winners.get(box, number) == number:
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
    return Directory(tensors, *_owned(assignment.groups, assignment.split.num_ranks))


def _with_box(place: BoxPlace | None, file: int, offsets: Sequence[int], sizes: Sequence[int]) -> BoxPlace:
    begin, end = tuple(offsets), tuple(offset + size for offset, size in zip(offsets, sizes, strict=True))
    if place is None:
        return BoxPlace(file, begin, end)
    return BoxPlace(file, tuple(map(min, place.begin, begin)), tuple(map(max, place.end, end)))


def _owned(groups: Sequence[ReplicaGroup], ranks: int) -> tuple[list[Mapping[str, Entry]], list[tuple[int, int]]]:
    """Return the sets of rank-local tensors, and the run-length encoding of which ranks have which."""
    numbers: dict[tuple[tuple[str, str, tuple[int, ...]], ...], int] = {}
    of_rank = [0] * ranks
    for replicas in groups:
        kind = tuple((name, box.dtype, box.shape) for name, box in own_boxes(replicas))
        number = numbers.setdefault(kind, len(numbers))
        for rank in replicas.ranks:
            of_rank[rank] = number
    return [{name: Entry(dtype, shape) for name, dtype, shape in kind} for kind in numbers], in_runs(of_rank)


def name_of(key: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """Return the name of a box in its file: the key itself if the box is the whole tensor."""
    return key if tuple(sizes) == tuple(shape) else f"{key}@{','.join(map(str, offsets))}"
