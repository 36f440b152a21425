"""How ranks that step by themselves tell each other that the run is to end."""

from __future__ import annotations

from typing import NamedTuple


class EndNotice(NamedTuple):
    """What a worker was told.

    Args:
        number: of a signal, or another one above 0 that says who gave the notice.
        age: seconds since.
    """

    number: int
    age: float


class HeardNotice(NamedTuple):
    """What a worker hears of a notice.

    Args:
        number: see :class:`EndNotice`.
        age: see :class:`EndNotice`.
        steps_left: that this worker still makes; 0: it ends now.
    """

    number: int
    age: float
    steps_left: int
