"""Try rows of a library in its environment: ``python -m tests.libraries.try_rows LIBRARY [ROW ...]``.

:mod:`tests.libraries.record` runs this with the interpreter of the library's environment. Outcomes are written to
``outcomes.json`` after each row; the whole text of each that is not equal is printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import chdir
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from tests.libraries.base import LOADED, SHUFFLED
from tests.libraries.environments import REFERENCE
from tests.libraries.table import recorded, theme_of, write
from tests.pool import RankPool
from tests.zoo.cells import rows, tried
from tests.zoo.record import shortened

# Seconds of a cell, with the import of the library in each rank.
TIMEOUT = 240.0


class Ranks:
    """Runs cases, those of the reference in processes of their own, where the library's own Lightning is imported."""

    def __init__(self) -> None:
        self._own, self._reference = RankPool(), RankPool()

    def __call__(self, function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        _, name, layout, *_ = args
        if name.endswith(LOADED):  # in new processes, since default arguments of a library may keep an earlier graph
            self._own.close()
            self._own = RankPool()
        with TemporaryDirectory() as folder, chdir(folder):
            if layout is not None:
                return self._own.run(function, world_size, *args, **options)
            with patch.dict(os.environ, {REFERENCE: "1"}):
                return self._reference.run(function, world_size, *args, **{"timeout": TIMEOUT, **options})

    def close(self) -> None:
        """End the processes."""
        self._own.close()
        self._reference.close()


def main() -> None:
    """Try the rows."""
    library, *names = sys.argv[1:]
    ranks = Ranks()
    for row in rows(theme_of(library)):
        if names and not any(row.name == name or row.name in (name + SHUFFLED, name + LOADED) for name in names):
            continue
        try:
            found = tried(ranks, theme_of(library), row, dict.fromkeys(row.layouts, True), TIMEOUT)
        except AssertionError as error:
            print(f"{library}:{row.name}: {error}", flush=True)
            continue
        for layout, outcome in found.items():
            print(f"{library}:{row.name} | {layout}: {outcome}", flush=True)
        known = recorded()
        known.setdefault(library, {})[row.name] = {layout: shortened(outcome) for layout, outcome in found.items()}
        write(known)
    ranks.close()


if __name__ == "__main__":
    main()
