"""Gathered parameters, whole gradients and buckets of a rank at the moments of a step."""

from __future__ import annotations

from trainwright.planning.memory.state import UnitState
from trainwright.planning.search.work import Work, bucket_bytes

# Packed buckets of gradients at once, see strategies/data/sharding/reducer.py.
_IN_FLIGHT = 2


class Buffers:
    """Bytes of gathered parameters, whole gradients and buckets of a rank at the moments of a step.

    Args:
        work: layout and step.
        blocks, heaviest, outside: what the rank's blocks, the heaviest of them, and what is outside of them weigh.

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
        # By ZeRO's own reducer.
        self._is_reduced = work.stage > 0 and not self._is_gathered and not self.is_alone
        self._bucket = min(bucket_bytes(work, state.whole), state.reduced)

    def persisting(self, averaged: float, whole: float) -> float:
        """Gradients that are there when the last backward begins."""
        work = self._work
        if work.stage == 0:
            is_ddp = work.layout.replicate > 1
            return whole if is_ddp or work.rounds > 1 else 0.0
        if work.rounds == 1:
            # ZeRO's own averaging shows shards on the parameters, until backward makes the next gradient of each.
            return averaged if self._is_reduced and work.offload == "none" else 0.0
        return whole if work.stage == 1 or work.no_sync else averaged

    @property
    def _beside_buckets(self) -> float:
        """Under DDP, gradients of earlier micro-batches, which are not in the buckets."""
        work = self._work
        return self._state.whole_gradients if work.stage == 0 and work.layout.replicate > 1 and work.rounds > 1 else 0.0

    @property
    def in_forward(self) -> float:
        """At the fullest moment of forward."""
        return self._gathered(1.0) + self._beside_buckets

    @property
    def in_last_block(self) -> float:
        """FSDP2 keeps what a block was gathered into, beside its parameters, until the next one is gathered."""
        return self._gathered(1.0 if self._work.prefetch == 0 else 2.0) + self._beside_buckets

    @property
    def in_head(self) -> float:
        """While backward goes through what follows the blocks."""
        return self._gathered(0.0) + self._beside_buckets

    @property
    def in_block(self) -> float:
        """When backward has entered the last block: gradients of what follows it are there."""
        if self._is_gathered:
            return self._gathered(1.0 + self.ahead) + self._outside.whole_gradients / 2  # this block's and the next's
        if self._is_reduced:
            return self._on_their_way(self._outside.reduced)
        return self._beside_buckets

    def _on_their_way(self, made: float) -> float:
        """Of the ZeRO reducer, when backward has made gradients of so many bytes.

        Those of a bucket stay until all of it are there and it is packed; packed buckets and what is left of them go
        on their way, a few at a time. Shards of a first micro-batch take the place of those of the step before.
        """
        work, size = self._work, self._bucket
        is_there = work.rounds > 1 and (work.stage == 1 or work.no_sync)  # added to whole ones of earlier passes
        unpacked = 0.0 if is_there else min(made, size)
        if not size or made < size:
            return unpacked
        buckets = min(_IN_FLIGHT, made // size)
        rows = buckets * size / work.layout.state_ranks if work.rounds > 1 else 0.0
        return unpacked + buckets * size + rows

    @property
    def in_first(self) -> float:
        """Within the backward of the first block: the others have their gradients."""
        others = self._state.whole_gradients - self._heaviest.whole_gradients
        if self._is_gathered:
            return self._gathered(1.0)
        if self._is_reduced:
            return self._on_their_way(self._state.reduced - self._heaviest.reduced)
        has_none = not self._beside_buckets and not self.persisting(0.0, self._state.whole_gradients)
        return others if has_none else self._beside_buckets

    @property
    def reducing(self) -> float:
        """While gradients of the block before are on their way: a copy of them, beside what :attr:`in_block` counts."""
        if self._is_gathered:
            return self.in_block + self._heaviest.whole_gradients
        if self._is_reduced:
            return self._on_their_way(self._outside.reduced + self._heaviest.reduced)
        return self._beside_buckets

    @property
    def ahead(self) -> float:
        """Blocks that are gathered while another computes, of those that there are beside it."""
        asked = 1.0 if self._work.prefetch is None else float(self._work.prefetch)
        others = self._blocks.whole / self._heaviest.whole - 1 if self._heaviest.whole else 0.0
        return min(asked, max(others, 0.0))

    @property
    def in_middle_block(self) -> float:
        """Within the forward of the last block that others are gathered ahead of."""
        return self._gathered(1.0 + self.ahead) + self._beside_buckets

    def _gathered(self, blocks: float) -> float:
        return self._outside.whole + blocks * self._heaviest.whole if self._is_gathered else 0.0

    @property
    def gathered_whole(self) -> float:
        """In a pipeline: what is gathered once for all passes."""
        return self._state.whole if self._is_gathered else 0.0

    def whole_of_stages(self, part: float) -> float:
        """In a pipeline: that, and whole gradients of a part of the rank's stages."""
        return self.gathered_whole + part * self._state.whole_gradients

    @property
    def whole_of_block(self) -> float:
        """Whole gradients of the heaviest block."""
        return self._heaviest.whole_gradients

    @property
    def whole_step(self) -> float:
        """In a pipeline, when all stages have gone backward."""
        return self.whole_of_stages(1.0)

    @property
    def at_end(self) -> float:
        """When backward is done, and the last gradients are averaged."""
        if self._work.has_pipeline:
            sent = self._heaviest.whole_gradients
            if self._is_reduced and self._bucket:
                # The gradients of a bucket are packed, and shards are left of those that are on their way.
                buckets = min(_IN_FLIGHT, self._state.reduced // self._bucket)
                sent = self._bucket * (1 + buckets / self._work.layout.state_ranks)
            return self.whole_step + (0.0 if self.is_alone else sent)
        if self._is_gathered:
            return self._outside.whole + self._outside.whole_gradients + self._heaviest.whole_gradients
        if self._is_reduced:
            return self._on_their_way(self._state.reduced)
        return self._beside_buckets
