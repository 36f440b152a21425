"""Sampling of ranks for files and traces when there are too many."""

from __future__ import annotations


def is_sampled(rank: int, world_size: int, most: int | None) -> bool:
    """Return whether a rank is in a sample of at most ``most`` ranks; rank 0 always is.

    One of each ``ceil(world_size / most)`` neighbours is, in rotating position, since ranks in the same position of a
    machine or a mesh would not be representative.

    Args:
        rank: the rank.
        world_size: number of ranks.
        most: size of the sample; ``None``: all ranks.
    """
    if most is None or world_size <= most:
        return True
    of_neighbours = -(-world_size // most)
    number, place = divmod(rank, of_neighbours)
    return place == number % of_neighbours


def sampled_ranks(world_size: int, most: int | None) -> list[int]:
    """Return the ranks in the sample, in order."""
    return [rank for rank in range(world_size) if is_sampled(rank, world_size, most)]
