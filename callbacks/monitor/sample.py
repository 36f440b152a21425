"""Which ranks are looked at where all are too many: as many files, or traces, as a person or a file system can bear."""

from __future__ import annotations


def is_sampled(rank: int, world_size: int, most: int | None) -> bool:
    """Whether a rank is among at most ``most`` that stand for all; rank 0 always is.

    One of each ``ceil(world_size / most)`` neighbours is, in turn the first, the second and so on of these: ranks of
    one place of a machine, or of a mesh, would not stand for the others.

    Args:
        rank: the rank.
        world_size: number of ranks.
        most: of the sample; ``None``, or as many as there are: all are.
    """
    if most is None or world_size <= most:
        return True
    of_neighbours = -(-world_size // most)
    number, place = divmod(rank, of_neighbours)
    return place == number % of_neighbours


def sampled_ranks(world_size: int, most: int | None) -> list[int]:
    """The ranks of which :func:`is_sampled` is true, in order."""
    return [rank for rank in range(world_size) if is_sampled(rank, world_size, most)]
