"""Communication buffers of a rank during a step: gathered parameters, whole gradients and buckets."""

from __future__ import annotations

from trainwright.planning.memory.state import UnitState
from trainwright.planning.search.work import BUCKET_BYTES, Work
from trainwright.strategies.data.bucket_size import bucket_bytes_for

# Packed buckets in flight, see strategies/data/sharding/reducer.py.
_IN_FLIGHT = 2


class Buffers:
    """Bytes of gathered parameters, whole gradients and buckets of a rank during a step.

    Args:
        work: layout and step.
        blocks, heaviest, outside: state of the rank's blocks, of the largest block, and of parts outside of blocks.

    Attributes:
        is_alone: whether no other rank trains the same parameters, so nothing is averaged.
    """

    def __init__(self, work: Work, blocks: UnitState, heaviest: UnitState, outside: UnitState) -> None:
        self._work, self._blocks, self._heaviest, self._outside = work, blocks, heaviest, outside
        state = blocks.plus(outside)
        self._state = state
        self._is_gathered = work.splits_parameters
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

    @property
    def _beside_buckets(self) -> float:
        """Under DDP, gradients of earlier micro-batches, which are outside of the buckets."""
        work = self._work
        return self._state.whole_gradients if work.stage == 0 and work.layout.replicate > 1 and work.rounds > 1 else 0.0

    @property
    def in_forward(self) -> float:
        """At the peak of forward."""
        return self._gathered(1.0) + self._beside_buckets

    @property
    def in_last_block(self) -> float:
        """In the last block: FSDP2 keeps the buffer of a gathered block until the next one is gathered."""
        return self._gathered(1.0 if self._work.prefetch == 0 else 2.0) + self._beside_buckets

    @property
    def in_head(self) -> float:
        """During backward of the parts after the blocks."""
        return self._gathered(0.0) + self._beside_buckets

    @property
    def in_block(self) -> float:
        """When backward enters the last block, with gradients of the parts after it."""
        if self._is_gathered:
            return self._gathered(1.0 + self.ahead) + self._outside.whole_gradients / 2  # this block and the next
        if self._is_reduced:
            return self._in_reducer(self._outside.reduced)
        return self._beside_buckets

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
    def in_first(self) -> float:
        """During backward of the first block, with gradients of all others."""
        others = self._state.whole_gradients - self._heaviest.whole_gradients
        if self._is_gathered:
            return self._gathered(1.0)
        if self._is_reduced:
            return self._in_reducer(self._state.reduced - self._heaviest.reduced)
        has_none = not self._beside_buckets and not self.persisting(0.0, self._state.whole_gradients)
        return others if has_none else self._beside_buckets

    @property
    def reducing(self) -> float:
        """While gradients of the previous block are reduced: their copy in addition to :attr:`in_block`."""
        if self._is_gathered:
            return self.in_block + self._heaviest.whole_gradients
        if self._is_reduced:
            return self._in_reducer(self._outside.reduced + self._heaviest.reduced)
        return self._beside_buckets

    @property
    def ahead(self) -> float:
        """Number of blocks gathered ahead."""
        asked = 1.0 if self._work.prefetch is None else float(self._work.prefetch)
        others = self._blocks.whole / self._heaviest.whole - 1 if self._heaviest.whole else 0.0
        return min(asked, max(others, 0.0))

    @property
    def in_middle_block(self) -> float:
        """In the forward of the last block with others gathered ahead."""
        return self._gathered(1.0 + self.ahead) + self._beside_buckets

    def _gathered(self, blocks: float) -> float:
        return self._outside.whole + blocks * self._heaviest.whole if self._is_gathered else 0.0

    def whole_of_stages(self, part: float) -> float:
        """In a pipeline: parameters gathered once, and whole gradients of a part of the rank's stages."""
        return (self._state.whole if self._is_gathered else 0.0) + part * self._state.whole_gradients

    @property
    def whole_of_block(self) -> float:
        """Whole gradients of the largest block."""
        return self._heaviest.whole_gradients

    @property
    def at_end(self) -> float:
        """After backward, while the last gradients are averaged."""
        if self._work.has_pipeline:
            sent = self._heaviest.whole_gradients
            if self._is_reduced and self._bucket:
                # One bucket is being packed; of those in flight shards remain.
                buckets = min(_IN_FLIGHT, self._state.reduced // self._bucket)
                sent = self._bucket * (1 + buckets / self._work.layout.state_ranks)
            return self.whole_of_stages(1.0) + (0.0 if self.is_alone else sent)
        if self._is_gathered:
            return self._outside.whole + self._outside.whole_gradients + self._heaviest.whole_gradients
        if self._is_reduced:
            return self._in_reducer(self._state.reduced)
        return self._beside_buckets
