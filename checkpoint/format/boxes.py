"""The boxes in which a tensor is stored, and whether they make up the whole. Neither torch nor Lightning is needed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product

from trainwright.core.text.bounded import ContentError, naturals, parse_json, shape_of

# Corners of boxes that are looked at for one tensor; 100,000 boxes in four dims have as many.
_MOST_CORNERS = 1 << 21


@dataclass(frozen=True)
class StoredBox:
    """Where one box of a tensor is kept: which box, in which file, under which name."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    name: str


@dataclass(frozen=True)
class PlainMetadata:
    """What ``tensors.json`` says of one tensor; its dtype by torch's name without ``torch.``."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


def plain_from_json(data: bytes) -> dict[str, PlainMetadata]:
    """What ``tensors.json`` of a checkpoint of few ranks says, by key.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: if it is no such file.
    """
    return {key: _metadata(entry) for key, entry in parse_json(data)["tensors"].items()}


def _metadata(entry: dict[str, object]) -> PlainMetadata:
    dtype, boxes = entry["dtype"], entry["boxes"]
    if not isinstance(dtype, str) or not isinstance(boxes, list):
        raise ContentError("a tensor has no dtype or no boxes")
    return PlainMetadata(shape_of(entry["shape"]), dtype, tuple(_box(*box) for box in boxes))


def _box(offsets: object, sizes: object, file: object, name: object) -> StoredBox:
    if not isinstance(file, str) or not isinstance(name, str):
        raise ContentError("a box is in no file")
    return StoredBox(naturals(offsets), naturals(sizes), file, name)


def problem_of_boxes(shape: tuple[int, ...], boxes: Collection[StoredBox], files: Collection[str]) -> str | None:
    """What is wrong with the boxes of a tensor, in words; ``None``: they are in ``files`` and make up the whole, each
    element once.
    """
    for box in boxes:
        if box.file not in files:
            return f"is said to be in {box.file!r}, no file of the manifest"
        if not is_within(box.offsets, box.sizes, shape):
            return f"cannot have a box at {box.offsets} of {box.sizes}"
    held, all_of_it = sum(math.prod(box.sizes) for box in boxes), math.prod(shape)
    if held < all_of_it:
        return f"is there with {held} of its {all_of_it} elements"
    # A box without elements could take the place of the one with elements that begins where it does.
    if all_of_it and any(0 in box.sizes for box in boxes):
        return "has a box without elements"
    whole = (0,) * len(shape), shape
    tiled = tiles(whole, [(box.offsets, box.sizes) for box in boxes])
    return None if tiled else "has boxes that overlap, so part of it is there twice"


def is_within(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box lies in a tensor of that shape."""
    if not len(offsets) == len(sizes) == len(shape):
        return False
    return all(min(o, s) >= 0 and o + s <= length for o, s, length in zip(offsets, sizes, shape, strict=True))


Extent = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a box."""


def tiles(whole: Extent, boxes: Sequence[Extent]) -> bool:
    """Whether boxes cover ``whole``, each element once, and nothing else.

    A sum of boxes is known by its signed corners alone (they are its derivative along every dim), so it is ``whole`` if
    and only if the corners of the boxes cancel, but for those of ``whole``. That takes time in proportion to the boxes,
    where comparing each with each would take it to their square.

    Raises:
        ContentError: if there are more corners than are looked at; no layout cuts tensors so.
    """
    # Dims along which nothing is cut have the same two corners in every box.
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
