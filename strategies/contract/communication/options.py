"""The words of ``communication``, and which of them are refused; without torch, for the command line."""

from __future__ import annotations

import difflib
from typing import Any

from trainwright.core.config.options import is_whole
from trainwright.core.layout import Layout

OFF = "none"
WORDS = (OFF, "advise", "auto")
ALL_REDUCE, IN_PARTS, HIERARCHICAL = "all_reduce", "reduce_scatter", "hierarchical"
AVERAGES = (ALL_REDUCE, IN_PARTS, HIERARCHICAL)
"""How gradients are averaged over replicas, see :mod:`trainwright.strategies.averaging.means`."""


def communication_problems(communication: Any) -> list[str]:
    """What is wrong with a choice of ``communication``; empty when nothing is."""
    if communication in WORDS:
        return []
    near = difflib.get_close_matches(str(communication), WORDS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return [f"strategy.communication={communication}: unknown.{hint} Allowed: {', '.join(WORDS)}."]


def average_problems(
    average_by: Any,
    ranks_per_node: Any = None,
    *,
    communication: str = OFF,
    compression: str | None = None,
    prefix: str = "",
) -> list[str]:
    """What is wrong with a way to average gradients over replicas; empty when nothing is.

    Args:
        average_by: of :data:`AVERAGES`; ``None``: all_reduce, or what ``communication=auto`` finds.
        ranks_per_node: neighbouring ranks that share a node; ``None``: those that a launcher started here.
        communication: of :data:`WORDS`.
        compression: name of the compressor; ``None``: none.
        prefix: what stands before an option's name where it is typed (``"strategy."``).
    """
    problems = []
    if average_by is not None and average_by not in AVERAGES:
        near = difflib.get_close_matches(str(average_by), AVERAGES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        problems.append(f"{prefix}average_by={average_by}: unknown.{hint} Allowed: {', '.join(AVERAGES)}, or null")
    elif average_by in (IN_PARTS, HIERARCHICAL) and compression is not None:
        problems.append(
            f"{prefix}average_by={average_by} with compression={compression}: compressed gradients are exchanged in a "
            f"way of their own. Type compression=none, or leave {prefix}average_by out"
        )
    if ranks_per_node is None:
        return problems
    if not is_whole(ranks_per_node, 1):
        problems.append(f"{prefix}ranks_per_node={ranks_per_node}: must be a whole number of at least 1")
    elif communication == OFF and average_by != HIERARCHICAL:
        problems.append(
            f"{prefix}ranks_per_node={ranks_per_node} has no effect: only averages in two levels look at nodes. Leave "
            f"it out, or type {prefix}average_by=hierarchical (or {prefix}communication=auto)"
        )
    return problems


def average_misfits(average_by: str | None, ranks_per_node: int, layout: Layout, prefix: str = "") -> list[str]:
    """Why gradients cannot be averaged in a way under a layout; empty if they can.

    Args:
        average_by: see :func:`average_problems`.
        ranks_per_node: neighbouring ranks that share a node.
        layout: closed.
        prefix: see :func:`average_problems`.
    """
    if average_by not in (IN_PARTS, HIERARCHICAL):
        return []
    given = f"{prefix}average_by={average_by}"
    if layout.replicate == 1:
        return [
            f"{given} with replicate=1: it says how replicas are averaged, and there is only one. Leave it out, or "
            f"type {prefix}replicate=2 (or more; strategy=ddp has as many as ranks)"
        ]
    copies = copies_of_a_node(layout, ranks_per_node)
    if average_by == IN_PARTS or 1 < copies < layout.replicate:
        return []
    stride = layout.shard * layout.context * layout.tensor
    nodes = f"{layout.replicate} replicas of {stride} rank(s) on nodes of {ranks_per_node} rank(s)"
    if layout.replicate * stride <= ranks_per_node:
        why = "one node holds all of them, so nothing crosses its border"
    elif stride >= ranks_per_node:
        why = "a node holds one of them at most, and ZeRO's shard axis averages within it already"
    else:
        why = "nodes would hold unequally many of them"
    return [
        f"{given}: {nodes}: {why}. Two levels need several nodes with several replicas each. Type "
        f"{prefix}average_by=all_reduce, or {prefix}ranks_per_node=... where nodes are others"
    ]


def copies_of_a_node(layout: Layout, ranks_per_node: int) -> int:
    """Replicas of the same state that each node holds; 0: not the same number everywhere.

    Args:
        layout: closed; neighbouring ranks differ along its last axes.
        ranks_per_node: neighbouring ranks that share a node.
    """
    stride = layout.shard * layout.context * layout.tensor
    if stride >= ranks_per_node:
        return 1
    if layout.replicate * stride <= ranks_per_node:
        return layout.replicate
    fits = ranks_per_node % stride == 0 and (layout.replicate * stride) % ranks_per_node == 0
    return ranks_per_node // stride if fits else 0


def replicas_step_alone(average_by: str) -> str:
    """What to say of a way to average gradients where replicas step by themselves."""
    return (
        f"strategy.average_by={average_by} with local updates: these replicas do not average gradients at every step; "
        "leave it out, or type strategy=ddp (or zero1, zero2, zero3, hybrid)"
    )


def chosen_already(communication: str) -> str:
    """What to say where replicas step by themselves."""
    return (
        f"strategy.communication={communication} with local updates: it compares ways to average gradients at every "
        "step, and these replicas do not; leave it out, or measure with strategy=ddp (or zero1, zero2, zero3, hybrid)"
    )


def prefetch_problems(prefetch: Any, stage: int, prefix: str = "") -> list[str]:
    """What is wrong with a depth; empty when nothing is.

    Args:
        prefetch: blocks to gather ahead; ``None``: what FSDP2 does.
        stage: of ZeRO.
        prefix: what stands before an option's name where it is typed (``"strategy."``).
    """
    if prefetch is None:
        return []
    if not is_whole(prefetch, 0):
        return [f"{prefix}prefetch={prefetch}: must be a whole number of blocks, 0 for none; leave it out for 1"]
    if stage != 3:
        return [
            f"{prefix}prefetch={prefetch} with stage {stage} has no effect: only stage 3 gathers parameters block by "
            f"block. Leave it out, or type {prefix}stage=3"
        ]
    return []


def prefetch_of_nothing(prefetch: int | None, layout: Layout, prefix: str = "") -> list[str]:
    """Why nothing is gathered under ``layout``, so that a depth of stage 3 would have no effect; empty if it has.

    Args:
        prefetch: see :func:`prefetch_problems`.
        layout: open or closed.
        prefix: see :func:`prefetch_problems`.
    """
    if prefetch is None or not layout.shard == layout.context == 1:
        return []
    return [
        f"{prefix}prefetch={prefetch} with shard=1 has no effect: every rank holds whole parameters, so none are "
        f"gathered. Leave it out, or type {prefix}shard=2"
    ]
