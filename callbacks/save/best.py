"""Which checkpoints of a run are the best ones."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class SaveRecord:
    """A checkpoint.

    Args:
        path: its folder.
        step: optimizer steps done.
        score: the monitored value at that step; ``None``: there was none.
    """

    path: str
    step: int
    score: float | None = None


class SaveRecords:
    """Remembers the newest checkpoint and the best ones.

    Args:
        keep_best: how many best ones are kept; 0: nothing is monitored.
        mode: whether the smallest (``"min"``) or the greatest (``"max"``) value is best.
    """

    def __init__(self, keep_best: int, mode: Literal["min", "max"]) -> None:
        self._keep_best = keep_best
        self._sign = 1.0 if mode == "min" else -1.0
        self.last: SaveRecord | None = None
        self.ranking: list[SaveRecord] = []
        """The best ones, the best of all first."""

    @property
    def best(self) -> SaveRecord | None:
        """The best one; where nothing is monitored the newest, as Lightning has it."""
        if self._keep_best == 0:
            return self.last
        return self.ranking[0] if self.ranking else None

    def is_among_best(self, score: float) -> bool:
        """Whether ``score`` is better than that of some checkpoint that is kept for its own; never for NaN."""
        if math.isnan(score) or self._keep_best == 0:
            return False
        return len(self.ranking) < self._keep_best or self._key(score) < self._key(self.ranking[-1].score)

    def add(self, record: SaveRecord) -> None:
        """Take up a checkpoint; one of the same path is replaced."""
        self.last = record
        self.ranking = [other for other in self.ranking if other.path != record.path]
        if record.score is not None and not math.isnan(record.score):
            # Sorting is stable: of equal ones the newer comes first, as it does where older ones are deleted.
            self.ranking = sorted([record, *self.ranking], key=lambda r: self._key(r.score))[: self._keep_best]

    def _key(self, score: float | None) -> float:
        assert score is not None
        return self._sign * score

    def with_one_more(self, record: SaveRecord | None) -> SaveRecords:
        """A copy that has taken up ``record`` too."""
        copy = SaveRecords(self._keep_best, "min" if self._sign > 0 else "max")
        copy.last, copy.ranking = self.last, list(self.ranking)
        if record is not None:
            copy.add(record)
        return copy

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "last": None if self.last is None else asdict(self.last),
            "ranking": [asdict(record) for record in self.ranking],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""
        self.last = None if state["last"] is None else SaveRecord(**state["last"])
        self.ranking = [SaveRecord(**record) for record in state["ranking"]][: self._keep_best]
