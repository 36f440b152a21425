"""Bucket sizes of ZeRO stages 1 and 2, without torch, for the planner."""

from __future__ import annotations

# Least number of buckets, unless they would be too small (bytes) to pay off.
_LEAST_BUCKETS = 16
_SMALL_BUCKET = 4 * 2**20


def bucket_bytes_for(largest: float, whole: float) -> float:
    """Return the bucket size: ``largest``, or less for a small model, which would otherwise be sent as one copy.

    Args:
        largest: ``strategy.bucket_mib`` in bytes.
        whole: bytes of all parameters.
    """
    return min(largest, max(whole / _LEAST_BUCKETS, _SMALL_BUCKET))
