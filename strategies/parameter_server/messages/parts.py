"""What a server holds in parts: neighbouring slices that are sent as one message while others are still computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainwright.strategies.parameter_server.server.sharder import Slice

# Numbers of a part, at least: shorter messages cost more than they hide.
LEAST_NUMEL = 2**18
# Parts of a server, at most.
_MOST = 16


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
