"""How large the pieces are in which ZeRO stages 1 and 2 send; without torch, for the planner too."""

from __future__ import annotations

# Pieces that a model is cut into, unless they would be so small (bytes) that sending them costs more than they save.
_LEAST_BUCKETS = 16
_SMALL_BUCKET = 4 * 2**20


def bucket_bytes_for(largest: float, whole: float) -> float:
    """At most ``largest``, and a small part of a small model, which else would travel as one whole copy.

    Args:
        largest: ``strategy.bucket_mib`` in bytes.
        whole: bytes of all parameters.
    """
    return min(largest, max(whole / _LEAST_BUCKETS, _SMALL_BUCKET))
