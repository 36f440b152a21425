"""Which server holds which rows of which parameter."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Numbers of a part, at least: shorter messages cost more than they hide.
LEAST_NUMEL = 2**18
# Parts of a server, at most.
_MOST = 16

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """Rows of a parameter that one server holds.

    Args:
        parameter: its index among those that are served.
        start: the first row, along dim 0; 0 for a scalar.
        stop: the row after the last; 1 for a scalar.
        shape: of the slice.
    """

    parameter: int
    start: int
    stop: int
    shape: Shape

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


def share_out(shapes: Sequence[Shape], servers: int, *, whole: bool = False) -> list[list[Slice]]:
    """Give each server parameters of about as many numbers: the largest first, to whoever has least.

    A tensor that is larger than a server's share is split by rows first.

    Args:
        shapes: of the parameters.
        servers: how many.
        whole: no tensor is split.

    Returns:
        For each server its slices, in the order of the parameters.

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
        # A server without any comes before one with empty tensors only.
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


def digest_of(names: Sequence[str], shapes: Sequence[Shape], rest: str) -> int:
    """A number of 52 bits for what is served: names, shapes and how they are optimized; the same on ranks that agree.

    It fits into a float64 without loss.
    """
    text = "\n".join(f"{name} {tuple(shape)}" for name, shape in zip(names, shapes, strict=True))
    return int.from_bytes(hashlib.blake2b(f"{text}\n{rest}".encode(), digest_size=8).digest(), "big") >> 12


@dataclass(frozen=True)
class ShardPart:
    """Neighbouring slices of a server.

    Args:
        first: number of the first slice.
        last: of the one after the last.
        start: the first number, where all slices lie one after the other.
        stop: the number after the last.
        is_early: whether gradients may be pushed as soon as backward has made them; few rows of those of tables are
            pushed, which are known then, but whose number is not.
    """

    first: int
    last: int
    start: int
    stop: int
    is_early: bool = True

    @property
    def slices(self) -> range:
        """Numbers of its slices."""
        return range(self.first, self.last)


def parts_of(held: Sequence[Slice], tables: Collection[int]) -> tuple[ShardPart, ...]:
    """Cut what a server holds into parts, in order; none if they would not be two at least.

    Args:
        held: slices.
        tables: indices of parameters whose gradients are pushed late.
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
