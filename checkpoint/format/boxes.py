"""Boxes in which a tensor is stored, and checks that they tile it. Imports neither torch nor Lightning."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from trainwright.core.text.bounded import ContentError, naturals, parse_json, shape_of

Extent = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a box."""

# Most box corners checked for one tensor; 100,000 boxes in four dims have about as many.
_MOST_CORNERS = 1 << 21


@dataclass(frozen=True)
class StoredBox:
    """Location of one box of a tensor: its extent, its file and its name there."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    name: str

    @property
    def extent(self) -> Extent:
        """Its offsets and sizes."""
        return self.offsets, self.sizes


@dataclass(frozen=True)
class StoredMetadata:
    """Entry of one tensor in ``tensors.json``; ``dtype`` is torch's name without ``torch.``."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


def to_json(stored: Mapping[str, StoredMetadata]) -> bytes:
    """Return ``tensors.json`` of format version 1: key -> dtype, shape and boxes ``[offsets, sizes, file, name]``."""
    plain = {
        key: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "boxes": [[list(box.offsets), list(box.sizes), box.file, box.name] for box in tensor.boxes],
        }
        for key, tensor in sorted(stored.items())
    }
    return json.dumps({"tensors": plain}, separators=(",", ":")).encode()


def plain_from_json(data: bytes) -> dict[str, StoredMetadata]:
    """Parse the output of :func:`to_json`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: if it is malformed.
    """
    return {key: _metadata(entry) for key, entry in parse_json(data)["tensors"].items()}


def _metadata(entry: dict[str, object]) -> StoredMetadata:
    dtype, boxes = entry["dtype"], entry["boxes"]
    if not isinstance(dtype, str) or not isinstance(boxes, list):
        raise ContentError("a tensor has no dtype or no boxes")
    return StoredMetadata(shape_of(entry["shape"]), dtype, tuple(_box(*box) for box in boxes))


def _box(offsets: object, sizes: object, file: object, name: object) -> StoredBox:
    if not isinstance(file, str) or not isinstance(name, str):
        raise ContentError("a box has no file")
    return StoredBox(naturals(offsets), naturals(sizes), file, name)


def problem_of_boxes(shape: tuple[int, ...], boxes: Collection[StoredBox], files: Collection[str]) -> str | None:
    """Return why the boxes of a tensor do not tile it exactly within ``files``; ``None`` if they do."""
    for box in boxes:
        if box.file not in files:
            return f"is stored in {box.file!r}, which the manifest does not list"
        if not is_within(*box.extent, shape):
            return f"cannot have a box at {box.offsets} of {box.sizes}"
    held, all_of_it = sum(math.prod(box.sizes) for box in boxes), math.prod(shape)
    if held < all_of_it:
        return f"has only {held} of its {all_of_it} elements"
    # An empty box could shadow the non-empty one at the same offsets.
    if all_of_it and any(0 in box.sizes for box in boxes):
        return "has an empty box"
    return None if tiles(extent_of(shape), [box.extent for box in boxes]) else "has overlapping boxes"


def extent_of(
    shape: tuple[int, ...], offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of a box of a tensor; by default it begins at 0 and extends to the end."""
    begin = (0,) * len(shape) if offsets is None else tuple(offsets)
    rest = tuple(length - offset for length, offset in zip(shape, begin, strict=False))
    return begin, rest if sizes is None else tuple(sizes)


def common(one: Extent, other: Extent) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the overlap of two boxes; if there is none, a size is 0."""
    sides = list(zip(*one, *other, strict=True))
    begin = tuple(max(first, other_first) for first, _, other_first, _ in sides)
    ends = (min(first + size, other_first + other_size) for first, size, other_first, other_size in sides)
    return begin, tuple(max(0, end - first) for first, end in zip(begin, ends, strict=True))


def is_within(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a box lies within a tensor of that shape."""
    if not len(offsets) == len(sizes) == len(shape):
        return False
    return all(min(o, s) >= 0 and o + s <= length for o, s, length in zip(offsets, sizes, shape, strict=True))


def tiles(whole: Extent, boxes: Sequence[Extent]) -> bool:
    """Return whether boxes cover ``whole`` exactly, each element once.

    A sum of box indicator functions is determined by its signed corners (its derivative along every dim), so it equals
    ``whole`` if and only if the corners cancel. This takes linear time, where pairwise comparison takes quadratic time.

    Raises:
        ContentError: if there are too many corners; no layout cuts tensors so.
    """
    # Uncut dims have the same two corners in every box.
    cut = [
        dim
        for dim in range(len(whole[0]))
        if any((offsets[dim], sizes[dim]) != (whole[0][dim], whole[1][dim]) for offsets, sizes in boxes)
    ]
    if len(boxes) << len(cut) > _MOST_CORNERS:
        raise ContentError(f"a tensor is cut into {len(boxes)} boxes along {len(cut)} dims")
    corners: dict[tuple[int, ...], int] = {}
    for sign, (offsets, sizes) in [(-1, whole), *((1, box) for box in boxes)]:
        for corner in product((0, 1), repeat=len(cut)):
            at = tuple(offsets[dim] + sizes[dim] * end for dim, end in zip(cut, corner, strict=True))
            corners[at] = corners.get(at, 0) + (-sign if sum(corner) % 2 else sign)
    return not any(corners.values())
