"""Activations of a rank at the moments of a step, from what was measured of a pass."""

from __future__ import annotations

from trainwright.planning.memory.share import Share
from trainwright.planning.search.work import Work
from trainwright.planning.time.cost import Part, Pass


class Kept:
    """Bytes of activations of a rank at the moments of a step.

    Args:
        cost: of a pass, cut as the layout cuts it.
        work: layout and step.
        share: what the rank has of the model.
    """

    def __init__(self, cost: Pass, work: Work, share: Share) -> None:
        self._cost, self._samples, self._share = cost, work.micro_batch, share

    def _of(self, part: Part) -> float:
        return part.kept.of(self._samples)

    @property
    def _through(self) -> float:
        """What is kept before the blocks and in them."""
        inside = sum(count * self._of(self._cost.blocks[kind]) for kind, count in self._share.blocks.items())
        return inside + self._of(self._cost.before)

    def forward(self) -> float:
        """At the fullest moment of forward."""
        return self._through + self._of(self._cost.after) + self._cost.forward_peak.of(self._samples)

    def head(self) -> float:
        """While backward goes through what follows the blocks."""
        return self._through + self._of(self._cost.after) + self._cost.head_peak.of(self._samples)

    def block(self) -> float:
        """Within the backward of the last block."""
        cost = self._cost
        return self._through + cost.entry.of(self._samples) + cost.block_peak.of(self._samples)

    def reduced(self) -> float:
        """When the last block has gone backward and its activations are gone, within the backward of the next."""
        return self.block() - self.heaviest_block

    def blocks(self, ahead: float = 0.0) -> float:
        """Within the forward of the last block, or of that which is followed by so many."""
        return self._through - ahead * self.heaviest_block + self._cost.forward_block.of(self._samples)

    def first(self) -> float:
        """Within the backward of the first block, when those of all others are gone."""
        cost = self._cost
        return (
            self._of(cost.before)
            + self.heaviest_block
            + cost.entry.of(self._samples)
            + cost.block_peak.of(self._samples)
        )

    @property
    def heaviest_block(self) -> float:
        """What the block that keeps most keeps."""
        return max((self._of(block) for block in self._cost.blocks), default=0.0)

    def deferred(self, passes: float) -> float:
        """Passes whose gradients of weights come later: the gradient of what each layer with weights has returned."""
        kinds = self._cost.blocks
        most = max(sum(n * kinds[kind].outputs.of(self._samples) for kind, n in each) for each in self._share.stages)
        return passes * most

    def pipeline(self, live: float, is_accumulating: bool = False) -> float:
        """So many passes that are in flight, and what is computed with one of them.

        Args:
            live: passes.
            is_accumulating: whether gradients of weights are added to those of an earlier pass, one by one.
        """
        cost, share, samples = self._cost, self._share, self._samples
        stages = [sum(n * self._of(cost.blocks[kind]) for kind, n in stage) for stage in share.stages]
        heaviest = max(stages)
        boundary = cost.boundary.of(samples)
        # What a stage hands on counts with its last block; what has arrived from another one comes on top.
        each = heaviest + (0.0 if share.has_first and len(stages) == 1 else boundary)
        total = live * each
        if share.has_first:
            total += live / len(stages) * self._of(cost.before)
        peak = cost.accumulating_peak if is_accumulating else cost.block_peak
        inside = boundary + peak.of(samples)
        if share.has_last:
            after = self._of(cost.after)
            inside = max(after + cost.head_peak.of(samples), inside)
        return total + inside
