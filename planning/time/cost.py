"""Costs of a pass of a module on one rank, and their combination.

Plain numbers: :mod:`~trainwright.planning.model.facts` measures them; memory and time are computed from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from trainwright.planning.model.experts import EVEN, Routing
from trainwright.strategies.contract.communication.meter import Sent


@dataclass(frozen=True)
class Bytes:
    """Bytes of a micro-batch as a linear function of its samples."""

    constant: float = 0.0
    per_sample: float = 0.0

    def of(self, samples: float) -> float:
        """Return the bytes for a number of samples."""
        return self.constant + self.per_sample * samples

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.constant + other.constant, self.per_sample + other.per_sample)

    def __sub__(self, other: Bytes) -> Bytes:
        return self + other.times(-1)

    def times(self, factor: float) -> Bytes:
        """Return a multiple."""
        return Bytes(self.constant * factor, self.per_sample * factor)


@dataclass(frozen=True)
class ModelCut:
    """Cut of a pass over ranks that process the same samples, and its recomputation.

    Args:
        tensor: ranks that split each weight; 1 is off.
        context: ranks that split the sequence; 1 is off.
        sequence_parallel: whether the tensor axis splits activations along the sequence.
        loss_parallel: whether logits stay split.
        checkpointing: ``"none"`` or ``"full"`` (backward recomputes every block).
        attention, balance: of the context axis.
        expert: ranks that hold different experts; 1 is off.
        routing: load of experts.
    """

    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    checkpointing: str = "none"
    attention: str = "ring"
    balance: bool = True
    expert: int = 1
    routing: Routing = EVEN


@dataclass(frozen=True)
class ModelPart:
    """Costs of a part of a pass on one rank: a block, or the part before or after the blocks.

    Args:
        flops: operations of forward per sample.
        backward: operations of backward per sample, including recomputation.
        kept: bytes alive at the loss, without parameters.
        sent: (axis, kind of collective) -> communication per sample.
        sent_forward: of that, in forward.
        outputs: bytes of outputs of layers with weights, equal to the bytes of their gradients.
        calls: torch operations of forward, whatever the number of samples; each has a fixed cost.
        backward_calls: those of backward, including recomputation.
        moved: bytes read and written by operations of forward other than matrix products.
        backward_moved: those of backward, including recomputation.
    """

    flops: float = 0.0
    backward: float = 0.0
    kept: Bytes = Bytes()
    sent: Mapping[tuple[str, str], Sent] = field(default_factory=dict)
    sent_forward: Mapping[tuple[str, str], Sent] = field(default_factory=dict)
    outputs: Bytes = Bytes()
    calls: float = 0.0
    backward_calls: float = 0.0
    moved: Bytes = Bytes()
    backward_moved: Bytes = Bytes()

    def with_excess(self, block: ModelPart, alike: ModelPart) -> ModelPart:
        """Return this part plus the excess of ``block`` over ``alike``."""
        sent, forward = dict(self.sent), dict(self.sent_forward)
        for own, more, usual in ((sent, block.sent, alike.sent), (forward, block.sent_forward, alike.sent_forward)):
            for key, each in more.items():
                less = usual.get(key, Sent())
                rest = Sent(
                    max(each.calls - less.calls, 0),
                    max(each.bytes - less.bytes, 0.0),
                    max(each.least - less.least, 0.0),
                )
                own[key] = own.get(key, Sent()) + rest
        return replace(self, kept=self.kept + block.kept - alike.kept, sent=sent, sent_forward=forward)

    def checkpointed(self, boundary: Bytes) -> ModelPart:
        """Return this block with activation checkpointing: only its input is kept, backward recomputes it."""
        return replace(
            self,
            backward=self.backward + self.flops,
            kept=boundary,
            sent={key: each + self.sent_forward.get(key, Sent()) for key, each in self.sent.items()},
            backward_calls=self.backward_calls + self.calls,
            backward_moved=self.backward_moved + self.moved,
        )

    def over(self, one: ModelPart, alone: ModelPart) -> ModelPart:
        """Scale this block by the ratio of ``alone``, which is split along another axis, to ``one``, which is whole.

        Args:
            one: the whole block.
            alone: the block split along another axis than this one.
        """
        return ModelPart(
            flops=_scaled(self.flops, alone.flops, one.flops),
            backward=_scaled(self.backward, alone.backward, one.backward),
            kept=_scaled_bytes(self.kept, alone.kept, one.kept),
            sent={**_scaled_sent(self.sent, alone, one), **_scaled_sent(alone.sent, self, one)},
            sent_forward={**_scaled_sent(self.sent_forward, alone, one), **_scaled_sent(alone.sent_forward, self, one)},
            outputs=_scaled_bytes(self.outputs, alone.outputs, one.outputs),
            calls=max(self.calls + alone.calls - one.calls, one.calls),
            backward_calls=max(self.backward_calls + alone.backward_calls - one.backward_calls, one.backward_calls),
            moved=_scaled_bytes(self.moved, alone.moved, one.moved),
            backward_moved=_scaled_bytes(self.backward_moved, alone.backward_moved, one.backward_moved),
        )


def _scaled(value: float, part: float, whole: float) -> float:
    return value * part / whole if whole else value


def _scaled_bytes(value: Bytes, part: Bytes, whole: Bytes) -> Bytes:
    """Scale by a ratio; the constant part is mostly weights: take the smaller one."""
    constant = min(value.constant, part.constant) if whole.constant else max(value.constant, part.constant)
    return Bytes(constant, _scaled(value.per_sample, part.per_sample, whole.per_sample))


def _scaled_sent(
    sent: Mapping[tuple[str, str], Sent], part: ModelPart, whole: ModelPart
) -> dict[tuple[str, str], Sent]:
    """Scale communication of activations by the part that another axis leaves."""
    factor = _scaled(1.0, part.kept.per_sample, whole.kept.per_sample)
    return {key: Sent(each.calls, each.bytes * factor, each.least * factor) for key, each in sent.items()}


@dataclass(frozen=True)
class PassCost:
    """Costs of forward and backward of a micro-batch on one rank, under one :class:`ModelCut`.

    Args:
        before, after: parts before the blocks and after them, the loss included.
        blocks: one for each kind of block.
        boundary: bytes passed between blocks.
        forward_block: peak of a block's forward, beyond kept bytes.
        forward_peak: peak of forward, beyond kept bytes.
        head_peak: peak of backward after the blocks, beyond kept bytes.
        entry: bytes beyond those kept by blocks and parts before them when backward enters the last block.
        block_peak: peak of a block's backward beyond that, including weight gradients.
        accumulating_peak: the same if weight gradients are accumulated and freed one by one.
    """

    before: ModelPart
    blocks: tuple[ModelPart, ...]
    after: ModelPart
    boundary: Bytes
    forward_block: Bytes
    forward_peak: Bytes
    head_peak: Bytes
    entry: Bytes
    block_peak: Bytes
    accumulating_peak: Bytes

    def checkpointed(self) -> PassCost:
        """Return the pass with activation checkpointing of all blocks."""
        blocks = tuple(block.checkpointed(self.boundary) for block in self.blocks)
        most = max((block.kept for block in self.blocks), key=lambda kept: kept.of(1), default=self.boundary)
        more = most - self.boundary
        return replace(
            self, blocks=blocks, block_peak=self.block_peak + more, accumulating_peak=self.accumulating_peak + more
        )

    def over(self, one: PassCost, alone: PassCost) -> PassCost:
        """Return the pass split along this pass's axis and that of ``alone``; ``one`` is split along neither.

        Activations, operations and traffic shrink by both factors; accurate enough for a search, and measured where it
        matters (:meth:`~trainwright.planning.model.facts.ModelFacts.of`).
        """
        names = [each.name for each in fields(self) if each.name not in ("before", "blocks", "after")]
        peaks = {name: _scaled_bytes(getattr(self, name), getattr(alone, name), getattr(one, name)) for name in names}
        return PassCost(
            before=self.before.over(one.before, alone.before),
            blocks=tuple(a.over(b, c) for a, b, c in zip(self.blocks, one.blocks, alone.blocks, strict=True)),
            after=self.after.over(one.after, alone.after),
            **peaks,
        )
