"""Arguments of a call by position or name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Arguments = dict[int | str, Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return arguments by position or name, in the order of the call."""
    given: Arguments = dict(enumerate(args))
    given.update(kwargs)
    return given


def call_of(given: Arguments) -> Call:
    """Return ``(args, kwargs)``; inverse of :func:`arguments`."""
    args = tuple(value for place, value in given.items() if isinstance(place, int))
    return args, {place: value for place, value in given.items() if isinstance(place, str)}


def first_tensor(given: Arguments, why: str) -> int | str:
    """Return the position or name of the first tensor.

    Raises:
        TypeError: with the message ``why``, if there is none.
    """
    for place, value in given.items():
        if isinstance(value, Tensor):
            return place
    raise TypeError(why)
