"""Assignment of a sequence's positions to the ranks of the context axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceOrder:
    """Split of a sequence over the ranks of a process group.

    Balanced: of ``2 x size`` equal chunks, rank ``r`` holds ``r`` and ``2 x size - 1 - r``, which balances the work of
    causal attention. Otherwise rank ``r`` holds the ``r``-th of ``size`` equal parts.

    Args:
        size: number of ranks.
        rank: of this process.
        balance: whether the split is balanced.
    """

    size: int
    rank: int
    balance: bool = True

    @classmethod
    def of(cls, group: dist.ProcessGroup, balance: bool) -> SequenceOrder:
        """Return the order for this rank in ``group``."""
        return cls(group.size(), group.rank(), balance)

    @property
    def chunks(self) -> int:
        """Number of equal chunks, of which sequence lengths must be a multiple."""
        return self.size * 2 if self.balance else self.size

    def held(self, rank: int) -> tuple[int, ...]:
        """Return the chunks of ``rank``, in sequence order."""
        return (rank, 2 * self.size - 1 - rank) if self.balance else (rank,)

    def divides(self, length: int) -> bool:
        """Return whether a sequence of ``length`` positions can be split."""
        return length > 0 and length % self.chunks == 0

    def check(self, length: int) -> None:
        """Refuse an indivisible length.

        Raises:
            ValueError: with the next larger valid length.
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
        """Return the positions of ``rank`` (default: this one) of a tensor with the whole sequence along ``dim``."""
        length = whole.size(dim) // self.chunks
        pieces = [whole.narrow(dim, chunk * length, length) for chunk in self.held(self.rank if rank is None else rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def whole(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Join the parts of all ranks, by rank, to the whole sequence."""
        if not self.balance:
            return torch.cat(tuple(parts), dim)
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return this rank's positions in a sequence of ``length``: int64, ``(length / size,)``."""
        return self.part(torch.arange(length, device=device), 0)
