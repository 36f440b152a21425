"""When which fragment of a model is averaged, by the number of optimizer steps alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateSchedule:
    """Fragments take turns: each is averaged every ``sync_every`` steps, the others at even distances between.

    Depends on nothing but the number of steps done, so that a run that is resumed, and every rank, finds the same.

    Args:
        sync_every: optimizer steps from one average of a fragment to the next.
        fragments: how many there are; at most ``sync_every``.
        warmup_steps: steps at the beginning in which nothing is averaged so; 0: none.
    """

    sync_every: int
    fragments: int = 1
    warmup_steps: int = 0

    def due(self, step: int) -> int | None:
        """The fragment that is to be averaged when ``step`` optimizer steps are done; ``None``: none."""
        if step <= self.warmup_steps:
            return None
        place = step % self.sync_every
        for fragment in range(self.fragments):
            if place == fragment * self.sync_every // self.fragments:
                return fragment
        return None
