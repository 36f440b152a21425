"""Which ranks share what: the sizes of the mesh axes of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes, outermost first; their product is the world size.

    ``-1`` on one axis means "the rest of the world". A layout with ``-1`` is *open*; :meth:`resolve` closes it.

    Args:
        replicate: ranks that hold copies of the same state (1 is off).
        shard: ranks that split one copy of the state among them (1 is off).

    Raises:
        ValueError: if a size is neither -1 nor at least 1, or if more than one axis is -1.
    """

    replicate: int = 1
    shard: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"{axis}={size!r} (allowed: -1 for the rest, or 1, 2, 3, ...)"
            for axis, size in self.sizes.items()
            if not isinstance(size, int) or isinstance(size, bool) or (size != -1 and size < 1)
        ]
        open_axes = [axis for axis, size in self.sizes.items() if size == -1]
        if len(open_axes) > 1:
            problems.append(f"{' and '.join(open_axes)} are all -1 (allowed: -1 on one axis)")
        if problems:
            raise ValueError("Impossible layout: " + "; ".join(problems) + ".")

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every mesh axis by name, outermost first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def is_open(self) -> bool:
        """Whether one axis still is ``-1``."""
        return -1 in self.sizes.values()

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
        """Number of ranks that read different samples: ``replicate x shard``."""
        return self.replicate * self.shard

    def resolve(self, world_size: int) -> Layout:
        """Close the layout for ``world_size`` ranks.

        Raises:
            ValueError: if the axes cannot make up exactly ``world_size`` ranks.
        """
        fixed = math.prod(size for size in self.sizes.values() if size != -1)
        if self.is_open and world_size % fixed == 0:
            return Layout(**{axis: world_size // fixed if size == -1 else size for axis, size in self.sizes.items()})
        if not self.is_open and fixed == world_size:
            return self
        axes = " x ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        divisors = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
        raise ValueError(
            f"The layout {axes} does not make up the {world_size} rank(s) of this run (devices x nodes). "
            f"Each axis must divide {world_size} ({divisors}), and one may be -1 for the rest: "
            f"for example strategy.shard=-1 strategy.replicate=1."
        )

    def __str__(self) -> str:
        used = [f"{axis} {size}" for axis, size in self.sizes.items() if size != 1]
        return " x ".join(used) if used else "one rank"
