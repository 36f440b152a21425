"""The last few states of this rank in its own memory, to go back to without reading anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainwright.checkpoint.memory.held import HeldState
from trainwright.checkpoint.write.save import Content
from trainwright.checkpoint.write.staging import Staging


@dataclass
class _Place:
    """Memory for one copy, used again for later ones."""

    staging: Staging
    held: HeldState | None = None


class Snapshots:
    """Copies of what this rank holds, in its own host memory; nothing is sent to anybody.

    A copy from a CUDA device goes into page-locked memory on a stream of its own, so that taking one does not wait for
    the device. The memory is that of ``keep`` states; it is used again and again.

    Args:
        keep: how many are kept; the oldest is overwritten by the next one.

    Raises:
        ValueError: if ``keep`` is less than 1.
    """

    def __init__(self, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"Snapshots(keep={keep}) (allowed: 1 or more)")
        self._places = [_Place(Staging()) for _ in range(keep)]

    def keep_at_least(self, count: int) -> None:
        """Keep more copies from now on, if there are fewer than ``count``."""
        self._places += [_Place(Staging()) for _ in range(count - len(self._places))]

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that are held."""
        return sum(place.staging.num_bytes for place in self._places)

    def steps(self) -> list[int]:
        """Steps of which there is a copy, newest first."""
        return sorted((place.held.step for place in self._places if place.held is not None), reverse=True)

    def take(self, content: Content, step: int) -> HeldState:
        """Copy; a copy of the same step is replaced, else the oldest one if there are ``keep``.

        Args:
            content: everything that this rank holds; it may change as soon as this returns.
            step: optimizer steps done.
        """
        place = self._place_for(step)
        place.held = None  # if there is no memory, half a copy must not be taken for one
        staged = place.staging.stage(content.tensors)
        place.held = HeldState(step, replace(content, tensors=staged.tensors), staged.copied)
        return place.held

    def newest(self, before_or_at: int | None = None) -> HeldState | None:
        """The newest copy, of a step that is not later than ``before_or_at``; ``None``: there is none.

        It is valid until it is overwritten: ``keep`` copies later.
        """
        held = [place.held for place in self._places if place.held is not None]
        held = [each for each in held if before_or_at is None or each.step <= before_or_at]
        return max(held, key=lambda each: each.step, default=None)

    def oldest(self) -> HeldState | None:
        """The oldest copy; ``None``: there is none."""
        held = [place.held for place in self._places if place.held is not None]
        return min(held, key=lambda each: each.step, default=None)

    def forget_after(self, step: int) -> None:
        """Forget the copies of later steps, which a run that went back to ``step`` makes anew."""
        for place in self._places:
            if place.held is not None and place.held.step > step:
                place.held = None

    def release(self) -> None:
        """Forget all copies and give the memory back."""
        for place in self._places:
            place.held = None
            place.staging.release()

    def _place_for(self, step: int) -> _Place:
        return min(self._places, key=lambda place: _age(place, step))


def _age(place: _Place, step: int) -> tuple[int, int]:
    """What is overwritten first has the least: the same step, what is free, what is oldest."""
    if place.held is None:
        return (1, 0)
    return (0, 0) if place.held.step == step else (2, place.held.step)
