"""Loaders with a state: its value after each optimizer step, and its restoration."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, IterableDataset

from trainwright.trainer.data.wrapped_loader import WrappedLoader


class RememberedStates(WrappedLoader):
    """Takes the state of a loader after the last batch of an optimizer step, rather than when it is saved, since the
    loop has prefetched batches by then.

    Args:
        loader: has ``state_dict`` and ``load_state_dict``, or its data set has them.
        every: number of batches per optimizer step.
    """

    # Batches that the loop and the loader that equalizes ranks may have prefetched.
    _AHEAD = 4

    def __init__(self, loader: Any, every: Callable[[], int]) -> None:
        super().__init__(loader)
        self._source = state_source(loader)
        self._every = every
        self._first_batch = 0
        self._ended = False
        self._waits = False
        self._states: dict[int, Any] = {}
        self._last: Any = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._waits:
            self._waits = False
            return
        first, self._first_batch = self._first_batch, 0
        ended, self._ended = self._ended, False
        length = sized_len(self.loader)
        batches = iter(self.loader)
        self._states, self._last = {first: self._state()}, None
        for count, batch in enumerate(self._begin(batches, ended), start=first + 1):
            if count % self._every() == 0:
                self._states[count] = self._state()
            for old in [key for key in self._states if key < count - self._every() - self._AHEAD]:
                del self._states[old]
            # The loop does not ask beyond the last batch if it knows their number.
            self._last = self._state() if count == length else None
            yield batch
        self._last = self._state()

    def _begin(self, batches: Iterator[Any], ended: bool) -> Iterator[Any]:
        found = False
        for batch in batches:
            found = True
            yield batch
        if ended and not found:
            # The state was behind the last batch, where only another request would have started an epoch.
            yield from self.loader

    def _state(self) -> Any:
        return copy.deepcopy(self._source.state_dict())

    def position(self, batches: int, finished: bool) -> dict[str, Any]:
        """Return the state after so many batches of the epoch; ``finished``: after all."""
        if not self._states:
            return {"state": self._state()}  # before any reading
        if finished:
            return {"state": self._states[max(self._states)] if self._last is None else self._last}
        return {"state": self._states[batches]}

    def resume(self, states: list[Any], rank: int, ranks: int, same: bool, first_batch: int, ended: bool) -> bool:
        """Resume where another run stopped, and return whether that is possible.

        Args:
            states: of all data ranks of that run.
            rank: data rank of this process.
            ranks: number of data ranks now.
            same: whether that run had as many data ranks and workers; else the loader or its data set must have
                ``load_state_dicts(states, rank, ranks)``.
            first_batch: batches used of the epoch.
            ended: whether they were all.
        """
        self._first_batch, self._ended = first_batch, ended
        if same:
            self._source.load_state_dict(states[rank])
            return True
        for candidate in (self.loader, getattr(self.loader, "dataset", None)):
            if callable(getattr(candidate, "load_state_dicts", None)):
                candidate.load_state_dicts(states, rank, ranks)  # type: ignore[union-attr]
                return True
        return False

    def wait_for_next_pass(self) -> None:
        """Yield nothing in the next pass, as the epoch has been read, and start in the one after."""
        self._waits = True

    @property
    def workers(self) -> int | None:
        """Number of workers, if each has a state; ``None`` if the state does not depend on them."""
        return getattr(self.loader, "num_workers", None) if self._source is self.loader else None


def state_source(loader: object) -> Any:
    """Return the owner of the ``state_dict`` with the position of ``loader``: itself or its data set; ``None`` if none.

    A data set's is useful only without workers, which hold copies of it.
    """
    if _is_stateful(loader):
        return loader
    dataset = getattr(loader, "dataset", None)
    is_stream = isinstance(loader, DataLoader) and isinstance(dataset, IterableDataset)
    return dataset if is_stream and loader.num_workers == 0 and _is_stateful(dataset) else None  # type: ignore[attr-defined]


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
