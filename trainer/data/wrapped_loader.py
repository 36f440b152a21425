"""A loader around a loader that looks like it."""

from __future__ import annotations

from typing import Any


class WrappedLoader:
    """Stands for another loader: what is not its own it has from that one.

    Args:
        loader: the loader inside.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        # What else people read of a loader: batch_size, dataset, num_workers, state_dict, ...
        if name in ("loader", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:
        return getattr(self.loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        # Lightning forgets a loader's iterator when it has stopped its workers. Kept by the loader inside, it would be
        # used again, and persistent workers that are gone be waited for.
        if hasattr(self.loader, "_iterator"):
            self.loader._iterator = iterator


def innermost(loader: Any) -> Any:
    """The loader inside all wrappings."""
    while isinstance(loader, WrappedLoader):
        loader = loader.loader
    return loader
