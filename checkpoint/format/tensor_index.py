"""Index of the boxes of a checkpoint's tensors, read from its metadata files."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from trainwright.checkpoint.format.boxes import (
    Extent,
    StoredBox,
    StoredMetadata,
    common,
    extent_of,
    is_within,
    plain_from_json,
    problem_of_boxes,
    tiles,
)
from trainwright.checkpoint.format.directory import Box, BoxPlace, Directory, Entry, box_of_rank, boxes_from_json
from trainwright.checkpoint.format.dtypes import dtype_named
from trainwright.checkpoint.format.manifest import read_whole
from trainwright.checkpoint.format.records import TENSORS, WHOLE, Manifest, file_of
from trainwright.checkpoint.store.paths import join_path
from trainwright.checkpoint.store.storage import Folder
from trainwright.checkpoint.write.box_index import name_of
from trainwright.checkpoint.write.split import boxes_file
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import interpreting


class TensorIndex:
    """Index of the tensors of a checkpoint; this one of format version 1, in which one file lists all boxes."""

    def __init__(self, stored: Mapping[str, StoredMetadata]) -> None:
        self._stored = stored

    def keys(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._stored.keys()

    def keys_under(self, prefix: str) -> list[str]:
        """Return the names that begin with ``prefix``."""
        return [key for key in self._stored if key.startswith(prefix)]

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor; :class:`KeyError` if there is none of that name."""
        return self._stored[key].shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor; :class:`KeyError` if there is none of that name."""
        return dtype_named(self._stored[key].dtype)

    def boxes(self, key: str, regions: Sequence[Extent] | None = None) -> StoredMetadata:
        """Return the locations of a tensor's boxes.

        Args:
            key: its name.
            regions: requested parts; ``None``: all. Boxes that do not overlap them may be omitted.

        Raises:
            CheckpointError: if the boxes do not cover the requested parts.
        """
        return self._stored[key]


def from_json(data: bytes, files: Mapping[str, Any], path: str) -> dict[str, StoredMetadata]:
    """Parse ``tensors.json`` of format version 1.

    Args:
        data: its contents.
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


def tensor_index(folder: Folder, manifest: Manifest) -> TensorIndex:
    """Return the index of the checkpoint in ``folder``.

    Raises:
        CheckpointError: if its metadata is malformed.
    """
    if manifest.version == WHOLE:
        return TensorIndex(from_json(folder.read(TENSORS), manifest.files, folder.path))
    return _SplitIndex(folder, manifest)


class _SplitIndex(TensorIndex):
    """Index of format version 2: a directory, and box files that are read on demand."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._files: dict[int, dict[str, list[Box]]] = {}
        self._found: dict[tuple[int, Extent], list[int]] = {}
        data = self._read(TENSORS)
        with interpreting(join_path(folder.path, TENSORS)):
            self._directory = Directory.from_bytes(data, manifest.num_files)
            for entry in _entries(self._directory):
                dtype_named(entry.dtype)

    def keys(self) -> Collection[str]:
        return self._directory.keys()

    def keys_under(self, prefix: str) -> list[str]:
        return self._directory.keys_under(prefix)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._entry(key).shape

    def dtype(self, key: str) -> torch.dtype:
        return dtype_named(self._entry(key).dtype)

    def boxes(self, key: str, regions: Sequence[Extent] | None = None) -> StoredMetadata:
        entry = self._entry(key)
        own = box_of_rank(key, entry.shape)
        if own is not None:
            return StoredMetadata(entry.shape, entry.dtype, (own,))
        if regions is None or 0 in entry.shape:
            regions = [extent_of(entry.shape)]
        found: dict[tuple[int, ...], StoredBox] = {}
        for offsets, sizes in regions:
            self._find(key, entry, (tuple(offsets), tuple(sizes)), found)
        return StoredMetadata(entry.shape, entry.dtype, tuple(found[offsets] for offsets in sorted(found)))

    def _find(self, key: str, entry: Entry, region: Extent, found: dict[tuple[int, ...], StoredBox]) -> None:
        """Add boxes to ``found``, by offsets, until they cover a part of a tensor.

        Raises:
            CheckpointError: if they do not cover it; the rest would silently keep its values.
        """
        expected = math.prod(region[1])

        def within(boxes: Iterable[StoredBox]) -> int:
            return sum(math.prod(common(region, box.extent)[1]) for box in boxes)

        held = within(found.values()) if expected or 0 not in entry.shape else -1  # an empty tensor has a box too
        # Boxes of many ranks are listed in many files; prefer one that is already loaded.
        for number in sorted(self._near(entry.places, region), key=lambda each: each not in self._files):
            if held == expected:
                break
            boxes = self._boxes_in(number, key, entry)
            held = max(0, held) + within(box for offsets, box in boxes.items() if offsets not in found)
            found.update(boxes)
        what = f"{self._folder.path}: of {key} of shape {entry.shape}, the part at {region[0]} of {region[1]}"
        if held not in (expected, -1):
            raise CheckpointError(f"{what} has only {held} of its {expected} elements.")
        with interpreting(what):
            parts = [common(region, box.extent) for box in found.values()]
            if expected and not tiles(region, [part for part in parts if 0 not in part[1]]):
                raise CheckpointError(f"{what} has overlapping boxes.")

    def _near(self, places: tuple[BoxPlace, ...], region: Extent) -> list[int]:
        """Return numbers of the box files that may overlap a part, cached by the tensor's pattern."""
        asked = id(places), region
        if asked not in self._found:
            self._found[asked] = [
                place.file for place in places if 0 in region[1] or 0 not in common(region, place.extent)[1]
            ]
        return self._found[asked]

    def _boxes_in(self, number: int, key: str, entry: Entry) -> dict[tuple[int, ...], StoredBox]:
        """Return the boxes of a tensor in one box file, by their offsets."""
        name = boxes_file(number)
        if number not in self._files:
            data = self._read(name)
            with interpreting(join_path(self._folder.path, name)):
                self._files[number] = boxes_from_json(data)
        boxes = {}
        for offsets, sizes, rank in self._files[number].get(key, ()):
            if not is_within(offsets, sizes, entry.shape):
                raise CheckpointError(
                    f"{self._folder.path}/{name}: {key} of shape {entry.shape} cannot have a box at "
                    f"{offsets} of {sizes}."
                )
            boxes[offsets] = StoredBox(offsets, sizes, file_of(rank), name_of(key, offsets, sizes, entry.shape))
        return boxes

    def _read(self, name: str) -> bytes:
        record = self._manifest.files.get(name)
        if record is None:
            raise CheckpointError(f"{self._folder.path} has no {name}, which lists its tensors.")
        # Verified again: ranks verify disjoint shares of the files, and metadata is small.
        return read_whole(self._folder, record)

    def _entry(self, key: str) -> Entry:
        entry = self._directory.find(key)
        if entry is None:
            raise KeyError(key)
        return entry


def _entries(directory: Directory) -> list[Entry]:
    return [*directory.tensors.values(), *(entry for kind in directory.kinds for entry in kind.values())]
