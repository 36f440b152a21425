"""Which positions of a sequence each rank of the context axis holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceOrder:
    """The cut of a sequence over the ranks of one process group.

    Balanced, the sequence is cut into ``2 x size`` equal chunks and rank ``r`` holds chunks ``r`` and
    ``2 x size - 1 - r``: under causal attention an early chunk with little to look at comes with a late one that has
    much, so all ranks work alike. Otherwise rank ``r`` holds the ``r``-th of ``size`` equal parts.

    Args:
        size: number of ranks.
        rank: this rank's place.
        balance: whether the cut is balanced.
    """

    size: int
    rank: int
    balance: bool = True

    @classmethod
    def of(cls, group: dist.ProcessGroup, balance: bool) -> SequenceOrder:
        """The order of this rank in ``group``."""
        return cls(group.size(), group.rank(), balance)

    @property
    def chunks(self) -> int:
        """Number of equal chunks that the sequence is cut into; its length must be a multiple."""
        return self.size * 2 if self.balance else self.size

    def held(self, rank: int) -> tuple[int, ...]:
        """The chunks of ``rank``, in the order of the sequence."""
        return (rank, 2 * self.size - 1 - rank) if self.balance else (rank,)

    def divides(self, length: int) -> bool:
        """Whether a sequence of ``length`` positions can be cut."""
        return length > 0 and length % self.chunks == 0

    def check(self, length: int) -> None:
        """Refuse a length that cannot be cut.

        Raises:
            ValueError: with the next length that can be.
        """
        if self.divides(length):
            return
        fitting = -(-max(length, 1) // self.chunks) * self.chunks
        loosened = f", or set balance=False, which needs a multiple of {self.size} only" if self.balance else ""
        raise ValueError(
            f"A sequence of {length} positions cannot be cut into {self.chunks} equal chunks for context={self.size}. "
            f"Make its length a multiple of {self.chunks}, for example pad or cut it to {fitting}{loosened}."
        )

    def part(self, whole: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """The positions of ``rank`` (this one by default) of a tensor that holds the whole sequence along ``dim``."""
        length = whole.size(dim) // self.chunks
        pieces = [whole.narrow(dim, chunk * length, length) for chunk in self.held(self.rank if rank is None else rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def whole(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole sequence from the parts of all ranks, in the order of the ranks."""
        if not self.balance:
            return torch.cat(tuple(parts), dim)
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Places in the whole sequence of ``length`` that this rank holds; int64, ``(length / size,)``."""
        return self.part(torch.arange(length, device=device), 0)
