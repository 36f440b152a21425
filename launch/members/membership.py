"""Who takes part in a run whose replicas come and go: pure arithmetic of members, ranks and replicas.

A *member* is a process, known by a number of its own; a *generation* is the time in which the same members train
together. A member keeps its number from generation to generation, its rank changes: ranks are always 0 to n - 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from trainwright.core.layout import Layout


@dataclass(frozen=True)
class Membership:
    """The members of one generation.

    Args:
        generation: 0 is the first.
        layout: closed; its replicas are what comes and goes.
        members: number of each member, by rank.
    """

    generation: int
    layout: Layout
    members: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.members) != self.layout.world_size or len(set(self.members)) != len(self.members):
            raise ValueError(f"{self.layout} has {self.layout.world_size} ranks, but the members are {self.members}.")

    @property
    def replicas(self) -> list[tuple[int, ...]]:
        """Members of each replica, in the order of its ranks."""
        found: list[list[int]] = [[] for _ in range(self.layout.replicate)]
        for rank, member in enumerate(self.members):
            found[self.layout.coordinates(rank)["replicate"]].append(member)
        return [tuple(replica) for replica in found]

    @property
    def replica_size(self) -> int:
        """Members of one replica."""
        return self.layout.world_size // self.layout.replicate

    def rank_of(self, member: int) -> int | None:
        """Rank of a member; ``None`` if it takes no part."""
        return self.members.index(member) if member in self.members else None

    def whole_replicas(self, lost: Collection[int]) -> list[tuple[int, ...]]:
        """The replicas that have lost no member."""
        return [replica for replica in self.replicas if not set(replica) & set(lost)]

    def next(self, lost: Collection[int], joining: Sequence[int] = ()) -> Membership | None:
        """The members of the next generation.

        Args:
            lost: members that are gone; what is left of their replicas goes too.
            joining: new members; whole replicas of them are taken, after the old ones.

        Returns:
            ``None`` if no old replica is whole: nobody has the state of the run then.
        """
        replicas = self.whole_replicas(lost)
        if not replicas:
            return None
        size = self.replica_size
        new = [tuple(joining[i : i + size]) for i in range(0, len(joining) - size + 1, size)]
        layout = replace(self.layout, replicate=len(replicas) + len(new))
        waiting = [iter(replica) for replica in (*replicas, *new)]
        places = (layout.coordinates(rank)["replicate"] for rank in range(layout.world_size))
        return Membership(self.generation + 1, layout, tuple(next(waiting[place]) for place in places))

    def sources(self, before: Membership) -> dict[int, int]:
        """New member -> the member that has what it is to hold: the one at its place in the first replica.

        Args:
            before: the generation before this one.
        """
        first = self.replicas[0]
        place = {member: index for replica in self.replicas for index, member in enumerate(replica)}
        return {member: first[place[member]] for member in self.members if member not in before.members}
