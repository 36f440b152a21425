"""Assignment of parameter rows to servers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

# Least number of elements of a part: shorter messages cost more than they hide.
LEAST_NUMEL = 2**18
# Largest number of parts per server.
_MOST = 16

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """Rows of a parameter on one server.

    Args:
        parameter: its index among the served ones.
        start: first row, along dim 0; 0 for a scalar.
        stop: row after the last; 1 for a scalar.
        shape: of the slice.
    """

    parameter: int
    start: int
    stop: int
    shape: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def share_out(shapes: Sequence[Shape], servers: int, *, whole: bool = False) -> list[list[Slice]]:
    """Assign parameters to servers, balanced by elements: the largest first, to the least loaded server.

    A tensor larger than a server's share is split by rows first.

    Args:
        shapes: of the parameters.
        servers: how many.
        whole: split no tensor.

    Returns:
        For each server its slices, in parameter order.

    Raises:
        ValueError: if a server would hold nothing.
    """
    share = -(-sum(map(math.prod, shapes)) // servers)
    pieces = [piece for index, shape in enumerate(shapes) for piece in _pieces(index, shape, share, whole)]
    if len(pieces) < servers:
        reason = "parameters" if whole else "parts of parameters"
        raise ValueError(
            f"{servers} parameter servers for {len(pieces)} {reason}: some would hold nothing. Use at most "
            f"servers={len(pieces)}."
        )
    held: list[list[Slice]] = [[] for _ in range(servers)]
    sizes = [0] * servers
    for piece in sorted(pieces, key=lambda piece: (-piece.numel, piece.parameter, piece.start)):
        # A server without slices comes before one with empty tensors only.
        least = min(range(servers), key=lambda server: (sizes[server], len(held[server])))
        held[least].append(piece)
        sizes[least] += piece.numel
    return [sorted(slices, key=lambda piece: (piece.parameter, piece.start)) for slices in held]


def _pieces(index: int, shape: Shape, share: int, whole: bool) -> list[Slice]:
    rows = shape[0] if shape else 1
    size = math.prod(shape)
    if whole or not shape or rows < 2 or size <= share:
        return [Slice(index, 0, rows, shape)]
    count = min(rows, -(-size // max(share, 1)))
    edges = [rows * part // count for part in range(count + 1)]
    return [Slice(index, a, b, (b - a, *shape[1:])) for a, b in zip(edges, edges[1:], strict=False)]


def places(slices: Sequence[Slice], flat: Tensor) -> Iterator[tuple[Slice, Tensor]]:
    """Yield each slice with its part of a vector of all of them, flat ``(piece.numel,)``."""
    return zip(slices, flat.split([piece.numel for piece in slices]), strict=True)


def digest_of(names: Sequence[str], shapes: Sequence[Shape], rest: str) -> int:
    """Return a 52-bit digest of names, shapes and ``rest``, which fits into a float64."""
    text = "\n".join(f"{name} {tuple(shape)}" for name, shape in zip(names, shapes, strict=True))
    return int.from_bytes(hashlib.blake2b(f"{text}\n{rest}".encode(), digest_size=8).digest(), "big") >> 12


@dataclass(frozen=True)
class ShardPart:
    """Consecutive slices of a server, sent together.

    Args:
        first: index of the first slice.
        last: index after the last slice.
        start: offset of the first element among all slices.
        stop: offset after the last element.
        is_early: whether gradients may be pushed during backward; not for tables, of which few rows are pushed and the
            number of rows is not known in advance.
    """

    first: int
    last: int
    start: int
    stop: int
    is_early: bool = True

    @property
    def slices(self) -> range:
        """Indices of its slices."""
        return range(self.first, self.last)


def parts_of(held: Sequence[Slice], tables: Collection[int]) -> tuple[ShardPart, ...]:
    """Split a server's slices into parts, in order; empty if there would be only one.

    Args:
        held: slices.
        tables: indices of parameters whose gradients are pushed after backward.
    """
    least = max(LEAST_NUMEL, sum(piece.numel for piece in held) // _MOST)
    found: list[ShardPart] = []
    first = start = position = 0
    for number, piece in enumerate(held):
        position += piece.numel
        late, following = piece.parameter in tables, held[number + 1 : number + 2]
        changes = any((other.parameter in tables) != late for other in following)
        if position - start >= least or changes or not following:
            found.append(ShardPart(first, number + 1, start, position, not late))
            first, start = number + 1, position
    return tuple(found) if len(found) > 1 else ()
