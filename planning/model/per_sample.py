"""What a pass costs by the number of its samples, from a run with two of them and one with three."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from trainwright.planning.model.counted_run import AFTER, BEFORE, CountedRun
from trainwright.planning.time.cost import Bytes, Part, Pass
from trainwright.strategies.contract.communication.meter import Sent


def pass_of(two: CountedRun, three: CountedRun, representatives: Sequence[int]) -> Pass:
    """From runs with two and with three samples.

    Args:
        two, three: the runs.
        representatives: for each kind of block, the place of the one that stands for it.
    """

    def grown(value: Callable[[CountedRun], float]) -> Bytes:
        first, second = value(two), value(three)
        return Bytes(3 * first - 2 * second, second - first)

    def part(phase: Any) -> Part:
        forward, backward = three.counter.forward, three.counter.backward
        return Part(
            flops=forward.flops[phase] / 3,
            backward=backward.flops[phase] / 3,
            kept=grown(lambda run: run.kept.get(phase, 0)),
            sent=_of_one(three.sent.get(phase, {})),
            sent_forward=_of_one(three.sent_forward.get(phase, {})),
            outputs=grown(lambda run: run.outputs.get(phase, 0)),
            calls=forward.calls[phase],
            backward_calls=backward.calls[phase],
            moved=grown(lambda run: run.counter.forward.moved[phase]),
            backward_moved=grown(lambda run: run.counter.backward.moved[phase]),
        )

    blocks = tuple(part(place) for place in representatives)
    before, after, through = part(BEFORE), part(AFTER), part(BEFORE).kept
    for place, block in two.blocks:
        through = through + part(place).kept
        alike = _stands_for(block, two.blocks, representatives)
        # What the first and the last block do besides belongs to what is before and after them.
        if place != alike and place == two.blocks[0][0]:
            before = before.with_excess(part(place), part(alike))
        elif place != alike and place == two.blocks[-1][0]:
            after = after.with_excess(part(place), part(alike))
    at = representatives[0] if representatives else -1
    return Pass(
        before=before,
        blocks=blocks,
        after=after,
        boundary=grown(lambda run: run.boundaries.get(at, 0)),
        forward_block=grown(lambda run: run.forward_block),
        forward_peak=grown(lambda run: run.forward_peak - run.at_loss),
        head_peak=grown(lambda run: run.head_peak - run.at_loss),
        entry=grown(lambda run: run.entry) - through,
        block_peak=grown(lambda run: run.block_peak - run.entry),
        accumulating_peak=grown(lambda run: run.accumulating_peak - run.entry),
    )


def _stands_for(block: nn.Module, blocks: Sequence[tuple[int, nn.Module]], representatives: Sequence[int]) -> int:
    """The place of the representative that is of the same class and shapes as a block."""
    shapes = {place: _likeness_of_parts(other) for place, other in blocks}
    own = _likeness_of_parts(block)
    return next((place for place in representatives if shapes[place] == own), representatives[0])


def _likeness_of_parts(block: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def _of_one(sent: Mapping[tuple[str, str], Sent]) -> dict[tuple[str, str], Sent]:
    """What a micro-batch of three samples has sent, for one of them."""
    return {key: Sent(each.calls, each.bytes / 3, each.least / 3) for key, each in sent.items()}
