"""Human-readable byte sizes."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(count: float, digits: int = 1) -> str:
    """Return a byte count in the largest unit in which it is at least 1, up to TiB.

    Args:
        count: bytes.
        digits: decimals, except for plain bytes.

    >>> size_text(1536), size_text(1536, digits=2), size_text(12)
    ('1.5 KiB', '1.50 KiB', '12 B')
    """
    value, unit = float(count), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.{digits if unit else 0}f} {_UNITS[unit]}"
