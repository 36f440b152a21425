"""What a pass of a module costs one rank, and how the costs of passes are put together.

Plain numbers: :mod:`~trainwright.planning.model.facts` finds them out, memory and time are computed from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from trainwright.planning.model.experts import EVEN, Routing
from trainwright.strategies.contract.communication.meter import Sent


@dataclass(frozen=True)
class Bytes:
    """Bytes of a micro-batch, in the number of its samples."""

    constant: float = 0.0
    per_sample: float = 0.0

    def of(self, samples: float) -> float:
        """Bytes for so many samples."""
        return self.constant + self.per_sample * samples

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.constant + other.constant, self.per_sample + other.per_sample)

    def __sub__(self, other: Bytes) -> Bytes:
        return self + other.times(-1)

    def times(self, factor: float) -> Bytes:
        """So many of them."""
        return Bytes(self.constant * factor, self.per_sample * factor)


@dataclass(frozen=True)
class ModelCut:
    """How a pass is split over ranks that work on the same samples, and what of it is computed twice.

    Args:
        tensor: ranks that split each weight; 1 is off.
        context: ranks that split the sequence; 1 is off.
        sequence_parallel: whether the tensor axis splits activations along the sequence.
        loss_parallel: whether logits stay split.
        checkpointing: ``"none"``, ``"full"`` (every block is computed again in backward) or ``"selective"``.
        checkpoint_modules: of ``"selective"``.
        attention, balance: of the context axis.
        expert: ranks that hold different experts; 1 is off.
        routing: how evenly tokens are spread over them.
    """

    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    checkpointing: str = "none"
    checkpoint_modules: tuple[str, ...] | None = None
    attention: str = "ring"
    balance: bool = True
    expert: int = 1
    routing: Routing = EVEN


@dataclass(frozen=True)
class ModelPart:
    """What a part of a pass costs one rank: a block, or what stands before or after the blocks.

    Args:
        flops: operations of forward, for one sample.
        backward: operations of backward, for one sample; what is computed again included.
        kept: bytes that are alive when the loss is there, parameters excluded.
        sent: (axis, kind of collective) -> what one sample's forward and backward send.
        sent_forward: of that, what forward sends.
        outputs: bytes that layers with weights of their own return; as large are the gradients of these.
        calls: operations of torch that forward runs, whatever the number of samples; each costs time of its own.
        backward_calls: those of backward; what is computed again included.
        moved: bytes that operations of forward without arithmetic of matrices read and write.
        backward_moved: those of backward; what is computed again included.
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
        """With what ``block`` costs more than ``alike``."""
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

    def again(self, boundary: Bytes) -> ModelPart:
        """The same block where only what enters it is kept, and all is computed again in backward."""
        sent = {key: _more(each, self.sent_forward.get(key)) for key, each in self.sent.items()}
        calls = self.backward_calls + self.calls
        return replace(
            self,
            backward=self.backward + self.flops,
            kept=boundary,
            sent=sent,
            backward_calls=calls,
            backward_moved=self.backward_moved + self.moved,
        )

    def over(self, one: ModelPart, alone: ModelPart) -> ModelPart:
        """This block where ``alone``, which is split, stands for ``one``, which is not.

        Args:
            one: the whole block.
            alone: the same, split along another axis than this one.
        """
        return ModelPart(
            flops=_scaled(self.flops, alone.flops, one.flops),
            backward=_scaled(self.backward, alone.backward, one.backward),
            kept=_scaled_bytes(self.kept, alone.kept, one.kept),
            sent={**_shrunk(self.sent, alone, one), **_shrunk(alone.sent, self, one)},
            sent_forward={**_shrunk(self.sent_forward, alone, one), **_shrunk(alone.sent_forward, self, one)},
            outputs=_scaled_bytes(self.outputs, alone.outputs, one.outputs),
            calls=max(self.calls + alone.calls - one.calls, one.calls),
            backward_calls=max(self.backward_calls + alone.backward_calls - one.backward_calls, one.backward_calls),
            moved=_scaled_bytes(self.moved, alone.moved, one.moved),
            backward_moved=_scaled_bytes(self.backward_moved, alone.backward_moved, one.backward_moved),
        )


def _more(sent: Sent, other: Sent | None) -> Sent:
    return sent if other is None else sent + other


def _scaled(value: float, part: float, whole: float) -> float:
    return value * part / whole if whole else value


def _scaled_bytes(value: Bytes, part: Bytes, whole: Bytes) -> Bytes:
    """What does not grow with the batch is weights, or little: the smaller of the two."""
    constant = min(value.constant, part.constant) if whole.constant else max(value.constant, part.constant)
    return Bytes(constant, _scaled(value.per_sample, part.per_sample, whole.per_sample))


def _shrunk(sent: Mapping[tuple[str, str], Sent], part: ModelPart, whole: ModelPart) -> dict[tuple[str, str], Sent]:
    """What is sent of activations of which the other axis leaves a part."""
    factor = _scaled(1.0, part.kept.per_sample, whole.kept.per_sample)
    return {key: Sent(each.calls, each.bytes * factor, each.least * factor) for key, each in sent.items()}


@dataclass(frozen=True)
class PassCost:
    """What forward and backward of a micro-batch cost one rank, under one :class:`ModelCut`.

    Args:
        before, after: what stands before the blocks and after them, the loss included.
        blocks: one for each kind of block.
        boundary: bytes of what one block hands to the next.
        forward_block: bytes that come on top of what is kept while forward goes through a block.
        forward_peak: bytes that come on top of all that is kept while forward goes on.
        head_peak: bytes that come on top of all that is kept while backward goes through what follows the blocks.
        entry: bytes on top of what blocks (and what is before them) keep when backward enters the last block.
        block_peak: bytes that come on top of that within the backward of a block, gradients of its weights included.
        accumulating_peak: the same where each gradient of a weight is added to an earlier one, and gone, once it is
            made.
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

    def again(self) -> PassCost:
        """The same pass with every block computed again in backward (activation checkpointing of all blocks)."""
        blocks = tuple(block.again(self.boundary) for block in self.blocks)
        most = max((block.kept for block in self.blocks), key=lambda kept: kept.of(1), default=self.boundary)
        more = most - self.boundary
        return replace(
            self,
            blocks=blocks,
            block_peak=self.block_peak + more,
            accumulating_peak=self.accumulating_peak + more,
        )

    def over(self, one: PassCost, alone: PassCost) -> PassCost:
        """The pass split along this one's axis and along that of ``alone``; ``one`` is split along neither.

        Activations, operations and what is sent shrink by both factors: near enough for a search, and measured where
        it matters (:meth:`~trainwright.planning.model.facts.ModelFacts.of`).
        """
        names = [each.name for each in fields(self) if each.name not in ("before", "blocks", "after")]
        peaks = {name: _scaled_bytes(getattr(self, name), getattr(alone, name), getattr(one, name)) for name in names}
        return PassCost(
            before=self.before.over(one.before, alone.before),
            blocks=tuple(a.over(b, c) for a, b, c in zip(self.blocks, one.blocks, alone.blocks, strict=True)),
            after=self.after.over(one.after, alone.after),
            **peaks,
        )
