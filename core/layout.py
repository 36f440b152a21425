"""Parallel layout of a run: the sizes of its mesh axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from trainwright.core.text.plain import aligned

# Ranks listed in a picture before the rest are only counted.
_SHOWN_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes, outermost first; without ``expert`` their product is the world size.

    Neighbouring ranks differ along the last axes, so ``tensor``, which communicates most, stays within one machine.
    ``-1`` on one axis means "the rest of the world". A layout with ``-1`` is *open*; :meth:`resolve` closes it.

    Args:
        pipeline: pipeline stages (1 is off).
        replicate: replicas of the same state (1 is off).
        shard: ranks that shard one replica's state (1 is off).
        context: ranks that split the sequence of the same samples (1 is off).
        tensor: ranks that split each weight of a layer (1 is off).
        expert: ranks that hold different experts (1 is off). It adds no ranks: it divides ``shard x context``, and
            ``-1`` takes all of that.

    Raises:
        ValueError: if a size is neither -1 nor at least 1, or if more than one axis is -1; the message lists all.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"{axis}={size!r} (allowed: -1 for the rest, or 1, 2, 3, ...)"
            for axis, size in self._all_sizes.items()
            if not isinstance(size, int) or isinstance(size, bool) or (size != -1 and size < 1)
        ]
        open_axes = [axis for axis, size in self.sizes.items() if size == -1]
        if len(open_axes) > 1:
            problems.append(f"{' and '.join(open_axes)} are all -1 (allowed: -1 on one axis)")
        if problems:
            raise ValueError("Impossible layout: " + "; ".join(problems) + ".")

    @property
    def _all_sizes(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every mesh axis that adds ranks, by name, outermost first."""
        return {axis: size for axis, size in self._all_sizes.items() if axis != "expert"}

    @property
    def is_open(self) -> bool:
        """True if one axis is ``-1``."""
        return -1 in self._all_sizes.values()

    @property
    def world_size(self) -> int:
        """Number of ranks of a closed layout.

        Raises:
            ValueError: if the layout is open.
        """
        if self.is_open:
            raise ValueError(f"{self} is open: call resolve(world_size) first.")
        return math.prod(self.sizes.values())

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks, which read different samples: ``replicate x shard``."""
        return self.replicate * self.shard

    @property
    def state_ranks(self) -> int:
        """Number of ranks over which ZeRO shards one copy of the state: ``shard x context``."""
        return self.shard * self.context

    def resolve(self, world_size: int) -> Layout:
        """Return the closed layout for ``world_size`` ranks.

        Raises:
            ValueError: if the axes cannot make up exactly ``world_size`` ranks, or ``expert`` does not divide ``shard x
                context``; the message lists both.
        """
        fixed = math.prod(size for size in self.sizes.values() if size != -1)
        is_open = -1 in self.sizes.values()
        if world_size % fixed or (not is_open and fixed != world_size):
            raise ValueError(self._does_not_fit(world_size))
        rest = world_size // fixed
        closed = replace(self, **{axis: rest for axis, size in self.sizes.items() if size == -1})
        if closed.expert == -1:
            return replace(closed, expert=closed.state_ranks)
        if closed.state_ranks % closed.expert:
            # Only one axis may take the rest of the world.
            example = f"strategy.shard={closed.expert}" if self.replicate == -1 else "strategy.shard=-1"
            raise ValueError(
                f"expert={closed.expert} does not divide shard x context = {closed.shard} x {closed.context} (allowed: "
                f"{_divisors(closed.state_ranks)}, or -1 for all of it), because experts are spread over ranks that "
                f"the other weights are sharded over. For example {example} strategy.expert=-1."
            )
        return closed

    def _does_not_fit(self, world_size: int) -> str:
        used = {axis: size for axis, size in self.sizes.items() if size != 1 or axis in ("replicate", "shard")}
        axes = " x ".join(f"{axis}={size}" for axis, size in used.items())
        return (
            f"The layout {axes} does not make up the {world_size} rank(s) of this run (devices x nodes). "
            f"Each axis must divide {world_size} ({_divisors(world_size)}), and one may be -1 for the rest: "
            f"for example strategy.shard=-1 strategy.replicate=1."
        )

    # ---- coordinates of ranks -------------------------------------------------------------------------------------

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of ``rank`` along every axis of a closed layout; for ``expert``, the index of its
        experts."""
        found, rest = {}, rank
        for axis, size in reversed(self.sizes.items()):
            rest, found[axis] = divmod(rest, size)
        ordered = {axis: found[axis] for axis in self.sizes}
        ordered["expert"] = (ordered["shard"] * self.context + ordered["context"]) % self.expert
        return ordered

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel index of ``rank``; ranks that differ along other axes share it."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]

    def first_of_data_rank(self, data_rank: int) -> int:
        """Return the first rank with the given data-parallel index."""
        replicate, shard = divmod(data_rank, self.shard)
        return (replicate * self.shard + shard) * self.context * self.tensor

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ along ``axes`` only, each in the order of the layout's axes.

        Args:
            axes: names of axes. ``expert`` means the ranks that hold different experts of one set, ``expert_shard``
                those of the same ``shard x context`` that hold the same experts.
        """
        within, between = self._places(axes)
        return [[first + place for place in within] for first in between]

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the group of :meth:`groups` that contains ``rank``, in time proportional to the group's size."""
        within, _ = self._places(axes, between=False)
        first = rank
        for size, stride, is_within in self._strides(axes):
            if is_within:
                first -= rank // stride % size * stride
        return [first + place for place in within]

    def _places(self, axes: tuple[str, ...], between: bool = True) -> tuple[list[int], list[int]]:
        """Return the ranks of the first group, and the first rank of each group."""
        within, firsts = [0], [0]
        for size, stride, is_within in self._strides(axes):
            if is_within:
                within = [place + stride * index for place in within for index in range(size)]
            elif between:
                firsts = [place + stride * index for place in firsts for index in range(size)]
        return within, firsts

    def _strides(self, axes: tuple[str, ...]) -> list[tuple[int, int, bool]]:
        """Return (size, stride, whether ranks of a group differ along it) of each axis, outermost first.

        ``shard x context`` is one axis, or two where experts divide it.
        """
        sizes = self.sizes
        if "expert" in axes:
            state = [(self.state_ranks // self.expert, "shard" in axes), (self.expert, True)]
        elif "expert_shard" in axes:
            state = [(self.state_ranks // self.expert, True), (self.expert, False)]
        else:
            state = [(self.shard, "shard" in axes), (self.context, "context" in axes)]
        ordered = [
            *((sizes[axis], axis in axes) for axis in ("pipeline", "replicate")),
            *state,
            (self.tensor, "tensor" in axes),
        ]
        found, stride = [], 1
        for size, is_within in reversed(ordered):
            found.append((size, stride, is_within))
            stride *= size
        return found[::-1]

    # ---- printing -------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        used = [f"{axis} {size}" for axis, size in self._all_sizes.items() if size != 1]
        return " x ".join(used) if used else "one rank"

    def picture(self) -> str:
        """Return a table of a closed layout: one line per rank with its coordinates, samples and state."""
        axes = [axis for axis, size in self._all_sizes.items() if size > 1]
        header = ["rank", *axes, "samples", "holds"]
        shown = range(min(self.world_size, _SHOWN_RANKS))
        rows = [[str(cell) for cell in self._row(rank, axes)] for rank in shown]
        lines = [line.removeprefix("  ") for line in aligned(header, rows, "<" * len(header))]
        if self.world_size > _SHOWN_RANKS:
            lines.append(f"... and {self.world_size - _SHOWN_RANKS} more ranks")
        return "\n".join([str(self), *lines])

    def _row(self, rank: int, axes: list[str]) -> list[object]:
        place = self.coordinates(rank)
        samples, holds = f"{self.data_rank(rank)} of {self.data_ranks}", ", ".join(self._held(place))
        return [rank, *(place[axis] for axis in axes), samples, holds]

    def _held(self, place: dict[str, int]) -> Iterator[str]:
        split = [f"stage {place['pipeline']} of {self.pipeline}"] if self.pipeline > 1 else []
        if self.tensor > 1:
            split.append(f"tensor part {place['tensor']} of {self.tensor}")
        if self.expert > 1:
            split.append(f"experts {place['expert']} of {self.expert}")
        if self.state_ranks > 1:
            split.append(f"shard {place['shard'] * self.context + place['context']} of {self.state_ranks}")
        if self.replicate > 1:
            split.append(f"copy {place['replicate']} of {self.replicate}")
        if self.context > 1:
            split.append(f"sequence part {place['context']} of {self.context}")
        yield from split or ["everything"]


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
