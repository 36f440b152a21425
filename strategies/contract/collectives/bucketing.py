"""Groups of tensors that one collective sends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def bucketed(
    items: Iterable[T], tag_of: Callable[[T], Hashable], bytes_of: Callable[[T], int], limit: int
) -> Iterator[list[T]]:
    """Group items, in order, into buckets of one tag and at most ``limit`` bytes (at least one item)."""
    filling: dict[Hashable, list[T]] = {}
    filled: dict[Hashable, int] = {}
    for item in items:
        tag, size = tag_of(item), bytes_of(item)
        if tag in filling and filled[tag] + size > limit:
            yield filling.pop(tag)
        filled[tag] = size + (filled[tag] if tag in filling else 0)
        filling.setdefault(tag, []).append(item)
    yield from filling.values()
