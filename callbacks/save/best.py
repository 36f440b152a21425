"""Ranking of the checkpoints of a run."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class SaveRecord:
    """A checkpoint.

    Args:
        path: its folder.
        step: optimizer steps done.
        score: the monitored value at that step; ``None``: none.
    """

    path: str
    step: int
    score: float | None = None


class SaveRecords:
    """The newest checkpoint and the best ones.

    Args:
        keep_best: number of best ones kept; 0: nothing is monitored.
        mode: ``"min"`` or ``"max"``, which values are best.

    Attributes:
        ranking: the best ones, best first.
    """

    def __init__(self, keep_best: int, mode: Literal["min", "max"]) -> None:
        self._keep_best = keep_best
        self._sign = 1.0 if mode == "min" else -1.0
        self.last: SaveRecord | None = None
        self.ranking: list[SaveRecord] = []

    @property
    def best(self) -> SaveRecord | None:
        """The best one; the newest if nothing is monitored, as in Lightning."""
        if self._keep_best == 0:
            return self.last
        return self.ranking[0] if self.ranking else None

    def is_among_best(self, score: float) -> bool:
        """Return whether ``score`` would enter the ranking; never for NaN."""
        if math.isnan(score) or self._keep_best == 0:
            return False
        return len(self.ranking) < self._keep_best or self._key(score) < self._key(self.ranking[-1].score)

    def add(self, record: SaveRecord) -> None:
        """Add a checkpoint; one of the same path is replaced."""
        self.last = record
        self.ranking = [other for other in self.ranking if other.path != record.path]
        if record.score is not None and not math.isnan(record.score):
            # A stable sort: of equal scores the newer comes first, consistent with deleting older ones.
            self.ranking = sorted([record, *self.ranking], key=lambda r: self._key(r.score))[: self._keep_best]

    def _key(self, score: float | None) -> float:
        assert score is not None
        return self._sign * score

    def including(self, record: SaveRecord | None) -> SaveRecords:
        """Return a copy with ``record`` added."""
        copied = copy(self)
        if record is not None:
            copied.add(record)
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "last": None if self.last is None else asdict(self.last),
            "ranking": [asdict(record) for record in self.ranking],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.last = None if state["last"] is None else SaveRecord(**state["last"])
        self.ranking = [SaveRecord(**record) for record in state["ranking"]][: self._keep_best]
