"""The data ranks of a run as the loop sees them: how many there are, which one this is, and what each of them has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.core.run.peers import peers_of
from trainwright.strategies.contract.collectives.ranks import ranks_of
from trainwright.trainer.loop.remembered_logs import summed_up

MOST_LOGGED = 256
"""Data ranks of which a checkpoint holds what each has logged; of more it holds the sum (the greatest, the least)."""


class DataRanks:
    """Exchanges states and logs among the data ranks.

    Args:
        strategy: of the run; one of Lightning's own has a data rank for each rank.
        rank: of this process among all ranks.
        group: gives the process group in which ranks agree; ``None`` for a single process.
    """

    def __init__(self, strategy: Any, rank: int, group: Callable[[], Any]) -> None:
        ranks = ranks_of(strategy)
        self.count, self.rank = ranks.num_data_ranks, ranks.data_rank
        self.is_apart = peers_of(strategy).is_apart
        """Whether ranks step by themselves, so that none waits for another."""
        self._layout, self._global_rank, self._group = getattr(strategy, "layout", None), rank, group

    def gathered(self, state: Any) -> list[Any]:
        """What each data rank gives, in order of the ranks; a collective unless this rank is apart."""
        if self.count == 1 or self.is_apart:
            return [state] * self.count
        by_rank = dict(all_gather_values((self.rank, state), self._group()))
        return [by_rank[rank] for rank in range(self.count)]

    def logged(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What each data rank has logged; of many, what all have together, as for a run on other data ranks."""
        if self.count <= MOST_LOGGED or self.is_apart:
            return self.gathered(mine)
        group, rank, layout = self._group(), self._global_rank, self._layout
        counts = layout is None or rank == layout.group_of(rank, "pipeline", "context", "tensor")[-1]
        told = all_gather_values(mine["metrics"] if counts and self.rank == 0 else None, group)
        metrics = next(each for each in told if each is not None)
        # Of rank 0 alone there is a value like any other's.
        entries = [entry for entry in mine["collected"] if self.rank == 0 or not entry["rank_zero_only"]]
        return [{"metrics": metrics, "collected": summed_up(entries, counts, group)}]
