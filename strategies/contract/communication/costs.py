"""Bytes sent per rank in a collective: the minimum over algorithms, and what a backend sends.

``n`` ranks; ``S`` as the column says, in bytes. "Least" assumes evenly shared work: the bytes that all ranks must
receive, divided by ``n`` (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009; Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005).

==============  ===========================  =================  ===================================================
kind            S                            least              gloo, if different
==============  ===========================  =================  ===================================================
all_reduce      the tensor                   2 (n - 1) / n S
all_gather      the gathered tensor          (n - 1) / n S
reduce_scatter  a rank's input               (n - 1) / n S      2 (n - 1) / n S: an all-reduce
all_to_all      the part for other ranks     S
broadcast       the tensor                   (n - 1) / n S      S per child in a binomial tree from the root
reduce          the tensor                   (n - 1) / n S      S; the root (n - 1) / n S
gather          a rank's input               S; the root none
scatter         a rank's output              none; the root (n - 1) S
send            the tensor                   S
==============  ===========================  =================  ===================================================

A sparse all-reduce counts as an ``all_gather`` of indices and values, assuming that all ranks have as many as this one.

NCCL's rings and trees send the minimum on average over the ranks. Headers (gloo: about 50 bytes a message), receives
and barriers do not count.
"""

from __future__ import annotations

from collections.abc import Callable

_Formula = Callable[[float, int, int], float]  # S, n, and the distance from the root

_LEAST: dict[str, _Formula] = {
    "all_reduce": lambda size, ranks, place: 2 * (ranks - 1) / ranks * size,
    "all_gather": lambda size, ranks, place: (ranks - 1) / ranks * size,
    "reduce_scatter": lambda size, ranks, place: (ranks - 1) / ranks * size,
    "all_to_all": lambda size, ranks, place: size,
    "broadcast": lambda size, ranks, place: (ranks - 1) / ranks * size,
    "reduce": lambda size, ranks, place: (ranks - 1) / ranks * size,
    "gather": lambda size, ranks, place: size if place else 0.0,
    "scatter": lambda size, ranks, place: 0.0 if place else (ranks - 1) * size,
    "send": lambda size, ranks, place: size,
}

_GLOO: dict[str, _Formula] = {
    "reduce_scatter": lambda size, ranks, place: 2 * (ranks - 1) / ranks * size,
    "broadcast": lambda size, ranks, place: children(place, ranks) * size,
    "reduce": lambda size, ranks, place: size if place else (ranks - 1) / ranks * size,
}

KINDS = tuple(_LEAST)


def least_bytes(kind: str, size: float, ranks: int, place: int = 0) -> float:
    """Return the bytes sent per rank by the best algorithm; arguments as in :func:`sent_bytes`."""
    return _LEAST[kind](size, ranks, place) if ranks > 1 else 0.0


def sent_bytes(kind: str, size: float, ranks: int, place: int = 0, backend: str = "gloo") -> float:
    """Return the bytes sent per rank with ``backend``; the minimum for backends other than gloo.

    Args:
        kind: of :data:`KINDS`.
        size: S of the table above, in bytes.
        ranks: of the group.
        place: distance of this rank from the root, modulo ``ranks``; 0 is the root.
        backend: of ``torch.distributed``, such as ``"gloo"`` or ``"nccl"``.
    """
    if backend != "gloo" or kind not in _GLOO:
        return least_bytes(kind, size, ranks, place)
    return _GLOO[kind](size, ranks, place) if ranks > 1 else 0.0


def children(place: int, ranks: int) -> int:
    """Return the number of children of a place in a broadcast's binomial tree with its root at place 0."""
    found, step = 0, 1
    while step < ranks and not place & step:
        found += place + step < ranks
        step *= 2
    return found
