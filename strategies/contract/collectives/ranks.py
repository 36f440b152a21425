"""Data-parallel ranks of a strategy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist


class Ranks:
    """Data-parallel ranks of a strategy; in this base class, all ranks.

    Args:
        strategy: with ``world_size`` and ``global_rank``; one rank if it has none.
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
        """Group of data ranks that includes this rank; ``None``: all ranks."""
        return None

    @property
    def leads_data_rank(self) -> bool:
        """True if this rank is the first of those that share its samples, which writes outputs."""
        return True

    def among_data_ranks(self) -> AbstractContextManager[None]:
        """Restrict collectives to data ranks around user code that one of the ranks that share samples runs."""
        return nullcontext()


def ranks_of(strategy: Any) -> Ranks:
    """Return the ranks of a strategy; under Lightning's own, every rank is a data rank."""
    found: Ranks = getattr(strategy, "ranks", None) or Ranks(strategy)
    return found
