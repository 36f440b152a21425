"""Values of the ``communication`` options and their checks; without torch, for the command line."""

from __future__ import annotations

from trainwright.core.layout import Layout

OFF = "none"
WORDS = (OFF, "advise", "auto")
ALL_REDUCE, IN_PARTS, HIERARCHICAL = "all_reduce", "reduce_scatter", "hierarchical"
AVERAGES = (ALL_REDUCE, IN_PARTS, HIERARCHICAL)
"""Methods to average gradients over replicas, see :mod:`trainwright.strategies.averaging.means`."""


def compressed_average(average_by: str | None, compressor: str) -> list[str]:
    """Return problems of combining ``average_by`` with compression."""
    if average_by not in (IN_PARTS, HIERARCHICAL):
        return []
    return [
        f"strategy.average_by={average_by} with compression={compressor}: compressors exchange gradients by their own "
        "method. Type compression=none, or leave strategy.average_by out"
    ]


def average_misfits(average_by: str | None, ranks_per_node: int, layout: Layout) -> list[str]:
    """Return problems of averaging gradients by a method under a layout.

    Args:
        average_by: of :data:`AVERAGES`; ``None``: all_reduce.
        ranks_per_node: number of consecutive ranks per node.
        layout: closed.
    """
    if average_by not in (IN_PARTS, HIERARCHICAL):
        return []
    given = f"strategy.average_by={average_by}"
    if layout.replicate == 1:
        return [
            f"{given} with replicate=1: it says how replicas are averaged, and there is only one. Leave it out, or "
            f"type strategy.replicate=2 (or more; strategy=ddp has as many as ranks)"
        ]
    copies = copies_of_a_node(layout, ranks_per_node)
    if average_by == IN_PARTS or 1 < copies < layout.replicate:
        return []
    stride = layout.shard * layout.context * layout.tensor
    nodes = f"{layout.replicate} replicas of {stride} rank(s) on nodes of {ranks_per_node} rank(s)"
    if layout.replicate * stride <= ranks_per_node:
        why = "one node holds all of them, so there is no traffic between nodes"
    elif stride >= ranks_per_node:
        why = "a node holds at most one of them, and ZeRO's shard axis averages within it already"
    else:
        why = "nodes would hold different numbers of them"
    return [
        f"{given}: {nodes}: {why}. Two levels need several nodes with several replicas each. Type "
        f"strategy.average_by=all_reduce, or set strategy.ranks_per_node to the real number of ranks per node"
    ]


def copies_of_a_node(layout: Layout, ranks_per_node: int) -> int:
    """Return the number of replicas of the same state per node; 0: it differs between nodes.

    Args:
        layout: closed; consecutive ranks differ along its last axes.
        ranks_per_node: number of consecutive ranks per node.
    """
    stride = layout.shard * layout.context * layout.tensor
    if stride >= ranks_per_node:
        return 1
    if layout.replicate * stride <= ranks_per_node:
        return layout.replicate
    fits = ranks_per_node % stride == 0 and (layout.replicate * stride) % ranks_per_node == 0
    return ranks_per_node // stride if fits else 0
