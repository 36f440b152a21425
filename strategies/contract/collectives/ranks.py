"""Which ranks read different samples."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist


class Ranks:
    """The ranks that read different samples; here all do.

    Args:
        strategy: with ``world_size`` and ``global_rank``, unless there is one rank.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def data_rank(self) -> int:
        """Index of this rank among the ranks that read different samples."""
        return int(getattr(self._strategy, "global_rank", 0))

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read different samples."""
        return int(getattr(self._strategy, "world_size", 1))

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that read different samples, this one among them; ``None``: all ranks."""
        return None

    @property
    def leads_data_rank(self) -> bool:
        """Whether this rank is the first of those that share its samples, which writes what is made of them."""
        return True

    def among_data_ranks(self) -> AbstractContextManager[None]:
        """Around user code that one rank of those that share samples runs: what it asks of all ranks, data ranks do."""
        return nullcontext()


def ranks_of(strategy: Any) -> Ranks:
    """Return the ranks of a strategy; under Lightning's own strategies every rank reads different samples."""
    found: Ranks = getattr(strategy, "ranks", None) or Ranks(strategy)
    return found
