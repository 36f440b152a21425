"""Data ranks of a run: their number, this one, and exchange between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.core.run.peers import peers_of
from trainwright.strategies.contract.collectives.ranks import ranks_of
from trainwright.trainer.loop.remembered_logs import reduce_entries

MOST_LOGGED = 256
"""Most data ranks whose logged values a checkpoint holds one by one; with more, it holds sum, maximum or minimum."""


class DataRanks:
    """Exchanges states and logs between data ranks.

    Args:
        strategy: of the run; with Lightning's own, each rank is a data rank.
        rank: global rank.
        group: returns the process group of agreements; ``None`` for a single process.

    Attributes:
        is_apart: true if steps are asynchronous, so that no rank waits for another.
    """

    def __init__(self, strategy: Any, rank: int, group: Callable[[], Any]) -> None:
        ranks = ranks_of(strategy)
        self.count, self.rank = ranks.num_data_ranks, ranks.data_rank
        self.is_apart = peers_of(strategy).is_apart
        self._layout, self._global_rank, self._group = getattr(strategy, "layout", None), rank, group

    def gather(self, state: Any) -> list[Any]:
        """Return the values of all data ranks in order; a collective unless steps are asynchronous."""
        if self.count == 1 or self.is_apart:
            return [state] * self.count
        by_rank = dict(all_gather_values((self.rank, state), self._group()))
        return [by_rank[rank] for rank in range(self.count)]

    def gather_logged(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the logged values of each data rank; with many, their reduction, as for other data ranks."""
        if self.count <= MOST_LOGGED or self.is_apart:
            return self.gather(mine)
        group, rank, layout = self._group(), self._global_rank, self._layout
        counts = layout is None or rank == layout.group_of(rank, "pipeline", "context", "tensor")[-1]
        known = all_gather_values(mine["metrics"] if counts and self.rank == 0 else None, group)
        metrics = next(each for each in known if each is not None)
        # A value of rank 0 only is like any other's.
        entries = [entry for entry in mine["collected"] if self.rank == 0 or not entry["rank_zero_only"]]
        return [{"metrics": metrics, "collected": reduce_entries(entries, counts, group)}]
