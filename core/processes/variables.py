"""Environment variables of this process, for a while."""

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def default_variables(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set variables within, except those that the user has set."""
    mine = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)
