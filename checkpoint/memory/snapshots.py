"""Ring buffer of snapshots in a rank's own memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainwright.checkpoint.memory.held import HeldState
from trainwright.checkpoint.write.save import Content
from trainwright.checkpoint.write.staging import Staging


@dataclass
class _Place:
    """Memory for one snapshot, reused for later ones."""

    staging: Staging
    held: HeldState | None = None


class Snapshots:
    """The last snapshots of this rank, in its own host memory; no communication.

    Copies from a CUDA device go into page-locked memory on a separate stream, so that taking one does not wait for the
    device. Memory for ``keep`` states is allocated once and reused.

    Args:
        keep: number of snapshots; the oldest is overwritten by the next one.

    Raises:
        ValueError: if ``keep`` is less than 1.
    """

    def __init__(self, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"Snapshots(keep={keep}) (allowed: 1 or more)")
        self._places = [_Place(Staging()) for _ in range(keep)]

    def keep_at_least(self, count: int) -> None:
        """Increase ``keep`` to at least ``count``."""
        self._places += [_Place(Staging()) for _ in range(count - len(self._places))]

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(place.staging.num_bytes for place in self._places)

    def steps(self) -> list[int]:
        """Return the steps of the snapshots, newest first."""
        return sorted((place.held.step for place in self._places if place.held is not None), reverse=True)

    def take(self, content: Content, step: int) -> HeldState:
        """Take a snapshot; it replaces one of the same step, else the oldest if there are ``keep``.

        Args:
            content: of this rank; it may change as soon as this returns.
            step: optimizer steps done.
        """
        place = self._place_for(step)
        place.held = None  # a failed copy must not leave a partial snapshot
        staged = place.staging.stage(content.tensors)
        place.held = HeldState(step, replace(content, tensors=staged.tensors), staged.copied)
        return place.held

    def newest(self, before_or_at: int | None = None) -> HeldState | None:
        """Return the newest snapshot of step ``before_or_at`` or earlier; ``None``: there is none.

        It is valid until it is overwritten, ``keep`` snapshots later.
        """
        held = [place.held for place in self._places if place.held is not None]
        held = [each for each in held if before_or_at is None or each.step <= before_or_at]
        return max(held, key=lambda each: each.step, default=None)

    def oldest(self) -> HeldState | None:
        """Return the oldest snapshot; ``None``: there is none."""
        held = [place.held for place in self._places if place.held is not None]
        return min(held, key=lambda each: each.step, default=None)

    def forget_after(self, step: int) -> None:
        """Drop the snapshots of later steps, after a roll-back to ``step``."""
        for place in self._places:
            if place.held is not None and place.held.step > step:
                place.held = None

    def release(self) -> None:
        """Drop all snapshots and free the memory."""
        for place in self._places:
            place.held = None
            place.staging.release()

    def _place_for(self, step: int) -> _Place:
        return min(self._places, key=lambda place: _age(place, step))


def _age(place: _Place, step: int) -> tuple[int, int]:
    """Return a sort key, lowest for what to overwrite first: the same step, a free place, the oldest."""
    if place.held is None:
        return (1, 0)
    return (0, 0) if place.held.step == step else (2, place.held.step)
