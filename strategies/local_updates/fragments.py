"""Which part of a model a parameter belongs to, where parts are averaged in turn."""

from __future__ import annotations

from collections.abc import Sequence


def fragment_of(name: str, blocks: Sequence[str], order: Sequence[str], count: int) -> int:
    """The fragment of a parameter: blocks are dealt out in turn (the strided pattern of arXiv:2501.18512, section 3.1).

    What stands before the blocks (an embedding) goes with the first fragment, what stands behind them (a norm, a head)
    with the last.

    Args:
        name: of the parameter.
        blocks: names of all repeated blocks of the model, in order.
        order: names of all parameters of the model, in order.
        count: how many fragments there are.
    """
    for index, block in enumerate(blocks):
        if name.startswith(f"{block}."):
            return index % count
    if count == 1 or name not in order:
        return 0
    place = order.index(name)
    first = next((at for at, each in enumerate(order) if each.startswith(f"{blocks[0]}.")), 0)
    return 0 if place < first else count - 1
