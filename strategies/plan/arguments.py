"""The arguments of a call, by position or name, and the first tensor among them: a model's hidden states."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Arguments = dict[int | str, Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Arguments by position or name, in the order of the call."""
    given: Arguments = dict(enumerate(args))
    given.update(kwargs)
    return given


def call_of(given: Arguments) -> Call:
    """What :func:`arguments` was given."""
    args = tuple(value for place, value in given.items() if isinstance(place, int))
    return args, {place: value for place, value in given.items() if isinstance(place, str)}


def first_tensor(given: Arguments, why: str) -> int | str:
    """Position or name of the first tensor.

    Raises:
        TypeError: if there is none, with ``why`` one is needed.
    """
    for place, value in given.items():
        if isinstance(value, Tensor):
            return place
    raise TypeError(why)
