"""Sides measured in turns, so that a busy moment of the machine does not affect only one of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import TypeVar

from benchmarks.report import say

Taken = TypeVar("Taken")


def alternate(
    sides: Mapping[str, Callable[[], Taken]], repeats: int, show: Callable[[Taken], str]
) -> dict[str, list[Taken]]:
    """Measure every side ``repeats`` times, each round beginning with another side.

    Args:
        sides: name -> a function that does the work once and returns what it took.
        repeats: rounds.
        show: writes one measurement, with its unit, for the progress on stderr.

    Returns:
        The measurements of every side, one per round.
    """
    taken: dict[str, list[Taken]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()  # what one side left must not be collected at the expense of the next
            taken[name].append(sides[name]())
        say(f"round {turn + 1}/{repeats}: " + ", ".join(f"{name} {show(all_[-1])}" for name, all_ in taken.items()))
    return taken
