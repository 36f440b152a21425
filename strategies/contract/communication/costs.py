"""Bytes that one rank sends in a collective: the least that any algorithm needs, and what a backend really sends.

``n`` ranks; ``S`` as the column says, in bytes. "Least" is for ranks that share the work evenly: what all ranks must
receive together, divided by them (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009; Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005).

==============  ===========================  =================  ===================================================
kind            S                            least              gloo, where that is something else
==============  ===========================  =================  ===================================================
all_reduce      the tensor                   2 (n - 1) / n S
all_gather      what all ranks get           (n - 1) / n S
reduce_scatter  what each rank gives         (n - 1) / n S      2 (n - 1) / n S: an all-reduce, of which a part is kept
all_to_all      what is for other ranks      S
broadcast       the tensor                   (n - 1) / n S      S for each child in a binomial tree below the root
reduce          the tensor                   (n - 1) / n S      S, but for the root: (n - 1) / n S
gather          what each rank gives         S; the root none
scatter         what each rank gets          none; the root (n - 1) S
send            the tensor                   S
==============  ===========================  =================  ===================================================

An all-reduce of sparse tensors gathers the indices and values of all ranks, and counts as ``all_gather`` of them, as if
every rank had as many values as this one.

NCCL's rings send the least, averaged over the ranks, and so do its trees in sum; in the last place of a broadcast's
ring nothing is sent, elsewhere S. Headers (gloo: some 50 bytes a message) do not count, nor does what a receive or a
barrier sends.
"""

from __future__ import annotations

from collections.abc import Callable

_Formula = Callable[[float, int, int], float]  # S, n, and how many ranks behind the root this one is

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
    """Bytes that a rank sends in the best algorithm.

    Args:
        kind: of :data:`KINDS`.
        size: S of the table above, in bytes.
        ranks: of the group.
        place: how many ranks behind the root this one is, the first behind the last; 0 is the root.
    """
    return _LEAST[kind](size, ranks, place) if ranks > 1 else 0.0


def sent_bytes(kind: str, size: float, ranks: int, place: int = 0, backend: str = "gloo") -> float:
    """Bytes that a rank sends with ``backend``; with another than gloo, the least.

    Args:
        kind: of :data:`KINDS`.
        size: S of the table above, in bytes.
        ranks: of the group.
        place: how many ranks behind the root this one is, the first behind the last; 0 is the root.
        backend: of ``torch.distributed``, such as ``"gloo"`` or ``"nccl"``.
    """
    if backend != "gloo" or kind not in _GLOO:
        return least_bytes(kind, size, ranks, place)
    return _GLOO[kind](size, ranks, place) if ranks > 1 else 0.0


def children(place: int, ranks: int) -> int:
    """Ranks to which one hands a broadcast on, in a binomial tree of ``ranks`` with its root at place 0."""
    found, step = 0, 1
    while step < ranks and not place & step:
        found += place + step < ranks
        step *= 2
    return found
