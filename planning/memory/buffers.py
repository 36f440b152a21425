"""Communication buffers of a rank during a step: gathered parameters, whole gradients and buckets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from trainwright.planning.memory.state import UnitState
from trainwright.planning.search.work import BUCKET_BYTES, Work
from trainwright.strategies.data.options import bucket_bytes_for

# Packed buckets in flight, see strategies/data/sharding/reducer.py.
_IN_FLIGHT = 2


class Buffers:
    """Bytes of gathered parameters, whole gradients and buckets of a rank during a step.

    Args:
        work: layout and step.
        blocks, heaviest, outside: state of the rank's blocks, of the largest block, and of parts outside of blocks.

    Attributes:
        heaviest: see above.
        is_alone: whether no other rank trains the same parameters, so nothing is averaged.
    """

    def __init__(self, work: Work, blocks: UnitState, heaviest: UnitState, outside: UnitState) -> None:
        self._work, self._blocks, self.heaviest, self._outside = work, blocks, heaviest, outside
        self._state = state = blocks.plus(outside)
        self._is_gathered = work.division.splits_parameters
        layout = work.layout
        self.is_alone = layout.replicate * layout.state_ranks == 1
        # With ZeRO's own reducer.
        self._is_reduced = work.stage > 0 and not self._is_gathered and not self.is_alone
        self._bucket = min(bucket_bytes_for(BUCKET_BYTES, state.whole), state.reduced)

    def persisting(self, averaged: float, whole: float) -> float:
        """Return the gradients that exist when the last backward begins."""
        work = self._work
        if work.stage == 0:
            is_ddp = work.layout.replicate > 1
            return whole if is_ddp or work.rounds > 1 else 0.0
        if work.rounds == 1:
            # ZeRO's reducer leaves shards on the parameters until backward produces the next gradient.
            return averaged if self._is_reduced and work.offload == "none" else 0.0
        return whole if work.stage == 1 or work.no_sync else averaged

    def by_moment(self) -> Mapping[str, float]:
        """Return the bytes at each moment of :meth:`KeptMemory.by_moment`."""
        work, outside, heaviest, state = self._work, self._outside, self.heaviest, self._state
        if self._is_gathered:
            # Of the parts outside of blocks, about half come after them and have gradients before the blocks do.
            head = outside.whole_gradients / 2
            found = {  # blocks gathered, gradients
                "blocks ahead": (1 + self.ahead, 0.0),
                # FSDP2 keeps the buffer of a gathered block until the next one is gathered.
                "last block": (1.0 if work.prefetch == 0 else 2.0, 0.0),
                "forward": (1.0, 0.0),
                "loss": (0.0, 0.0),
                "backward": (1 + self.ahead, head),
                "reducing": (1 + self.ahead, head + heaviest.whole_gradients),  # a copy of the previous block's
                "first block": (1.0, 0.0),
                "averaging": (0.0, outside.whole_gradients + heaviest.whole_gradients),
            }
            return {at: outside.whole + blocks * heaviest.whole + made for at, (blocks, made) in found.items()}
        if self._is_reduced:
            reduced = {"backward": outside.reduced, "reducing": outside.reduced + heaviest.reduced}
            reduced |= {"first block": state.reduced - heaviest.reduced, "averaging": state.reduced}
            return defaultdict(float, {at: self._in_reducer(made) for at, made in reduced.items()})
        whole = state.whole_gradients
        # Under DDP, gradients of earlier micro-batches are outside of the buckets.
        beside = whole if work.stage == 0 and work.layout.replicate > 1 and work.rounds > 1 else 0.0
        is_first = not beside and not self.persisting(0.0, whole)
        return defaultdict(lambda: beside, {"first block": whole - heaviest.whole_gradients} if is_first else {})

    def _in_reducer(self, made: float) -> float:
        """Return the bytes in ZeRO's reducer after backward produced ``made`` bytes of gradients.

        Gradients of a bucket stay until it is complete and packed; a few packed buckets and their shards are in flight.
        Shards of a first micro-batch replace those of the step before.
        """
        work, size = self._work, self._bucket
        is_there = work.rounds > 1 and (work.stage == 1 or work.no_sync)  # accumulated in whole gradients
        unpacked = 0.0 if is_there else min(made, size)
        if not size or made < size:
            return unpacked
        buckets = min(_IN_FLIGHT, made // size)
        rows = buckets * size / work.layout.state_ranks if work.rounds > 1 else 0.0
        return unpacked + buckets * size + rows

    @property
    def ahead(self) -> float:
        """Number of blocks gathered ahead."""
        asked = 1.0 if self._work.prefetch is None else float(self._work.prefetch)
        others = self._blocks.whole / self.heaviest.whole - 1 if self.heaviest.whole else 0.0
        return min(asked, max(others, 0.0))

    def whole_of_stages(self, part: float) -> float:
        """In a pipeline: parameters gathered once, and whole gradients of a part of the rank's stages."""
        return (self._state.whole if self._is_gathered else 0.0) + part * self._state.whole_gradients

    def averaging_stages(self) -> float:
        """In a pipeline: while the last gradients are averaged, after backward."""
        sent = self.heaviest.whole_gradients
        if self._is_reduced and self._bucket:
            # One bucket is being packed; of those in flight shards remain.
            buckets = min(_IN_FLIGHT, self._state.reduced // self._bucket)
            sent = self._bucket * (1 + buckets / self._work.layout.state_ranks)
        return self.whole_of_stages(1.0) + (0.0 if self.is_alone else sent)
