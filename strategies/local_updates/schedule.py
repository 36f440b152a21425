"""Schedule of synchronizations by optimizer step, and fragments of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateSchedule:
    """Fragments in turn, each every ``sync_every`` steps, evenly spaced.

    Depends on the step count only, so it is the same on all ranks and after a resume.

    Args:
        sync_every: optimizer steps between averages of a fragment.
        fragments: at most ``sync_every``.
        warmup_steps: first steps, without synchronizations; 0: none.
    """

    sync_every: int
    fragments: int = 1
    warmup_steps: int = 0

    def due(self, step: int) -> int | None:
        """Return the fragment to average after ``step`` optimizer steps, if any."""
        if step <= self.warmup_steps:
            return None
        place = step % self.sync_every
        for fragment in range(self.fragments):
            if place == fragment * self.sync_every // self.fragments:
                return fragment
        return None


def fragment_of(name: str, blocks: Sequence[str], order: Sequence[str], count: int) -> int:
    """Return the fragment of a parameter: blocks are assigned round-robin (arXiv:2501.18512, section 3.1).

    Parameters before the blocks (an embedding) belong to the first fragment, those after them (a norm, a head) to the
    last.

    Args:
        name: of the parameter.
        blocks: names of the model's repeated blocks, in order.
        order: names of all parameters of the model, in order.
        count: number of fragments.
    """
    for index, block in enumerate(blocks):
        if name.startswith(f"{block}."):
            return index % count
    if count == 1 or name not in order:
        return 0
    place = order.index(name)
    first = next((at for at, each in enumerate(order) if each.startswith(f"{blocks[0]}.")), 0)
    return 0 if place < first else count - 1
