"""Names of process groups by the mesh axes along which their ranks differ."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from trainwright.core.layout import Layout

WORLD = "world"
OTHER = "other"
# ZeRO shards over both as one axis.
_STATE = ("shard", "context")


def name_of(ranks: Iterable[int], kind: str, layout: Layout) -> str:
    """Return the name under which a group's collectives are counted.

    The axis along which its ranks differ; ``"expert_shard"`` for ranks with the same experts; several axes joined
    (``"shard-context"``); ``"world"`` for all ranks of a layout with several axes; or ``"other"``. If a group is both
    ``expert`` and a dense axis, all-to-alls count as the experts' (``"context-expert"`` if the axis is context, since
    Ulysses attention has all-to-alls too).

    Args:
        ranks: global ranks of the group.
        kind: of collective.
        layout: closed.
    """
    wanted = sorted(ranks)
    dense = next((axis for axis in _used(layout) if _differ_along(wanted, layout, axis)), None)
    if layout.expert > 1:
        experts = _differ_along(wanted, layout, "expert")
        if experts and (dense is None or kind == "all_to_all"):
            return "context-expert" if dense == "context" else "expert"
        if dense is None and _differ_along(wanted, layout, "expert_shard"):
            return "expert_shard"
    return dense or _name_of_several(wanted, layout)


def _name_of_several(wanted: list[int], layout: Layout) -> str:
    used = _used(layout)
    for count in range(2, len(used) + 1):
        for axes in combinations(used, count):
            if _differ_along(wanted, layout, *axes):
                return WORLD if len(axes) == len(used) and axes != _STATE else "-".join(axes)
    return OTHER


def _used(layout: Layout) -> list[str]:
    return [axis for axis, size in layout.sizes.items() if size > 1]


def _differ_along(wanted: list[int], layout: Layout, *axes: str) -> bool:
    return len(wanted) > 1 and wanted == layout.group_of(wanted[0], *axes)
