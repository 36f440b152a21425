"""Bookkeeping of leases: which parts of an epoch are leased to which worker, and which are done. Free of processes.

Asynchronous workers have no equal shares of an epoch: a fast one reads more. So they lease *chunks* of the epoch's
order one after another. A chunk is leased once, and done when the worker reports that it has trained on it. The
guarantee says what happens to the chunks of a dead worker:

- ``"at_least_once"``: they are leased again. Every sample is trained on, and each chunk held by the dead worker may
  have been trained on before.
- ``"at_most_once"``: they are lost. No sample is trained on twice, and each chunk held by the dead worker may not have
  been trained on at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

Guarantee = Literal["at_least_once", "at_most_once"]
GUARANTEES: tuple[str, ...] = get_args(Guarantee)


class Lease(NamedTuple):
    """A chunk of an epoch.

    Args:
        number: of the chunk, from 0.
        first: position of its first sample in the order.
        last: position after its last sample.
    """

    number: int
    first: int
    last: int

    @property
    def samples(self) -> int:
        """Samples of the chunk."""
        return self.last - self.first


class LeaseBook:
    """The chunks of an epoch, or of the rest of one.

    Args:
        samples: number of samples.
        chunk: samples per chunk; the last one may have fewer.
        guarantee: see the module.
        limit: lease nothing once so many samples are done or leased; ``None``: no limit.
    """

    def __init__(
        self, samples: int, chunk: int, guarantee: Guarantee = "at_least_once", limit: int | None = None
    ) -> None:
        self.samples, self.chunk, self.guarantee, self.limit = samples, chunk, guarantee, limit
        self._chunks = -(-samples // chunk)
        self._next = 0
        self._returned: deque[int] = deque()
        self._holder: dict[int, int] = {}
        self._leased = 0
        self._done, self._lost = _Chunks(), _Chunks()
        self.done_samples = self.lost_samples = 0

    # ---- workers --------------------------------------------------------------------------------------------------

    def lease(self, worker: int) -> Lease | None:
        """Lease the next chunk to this worker; ``None``: there is none now.

        Returned chunks go first, so that the end of an epoch does not wait for them.
        """
        if not self.has_more:
            return None
        if self._returned:
            number = self._returned.popleft()
        else:
            number, self._next = self._next, self._next + 1
        lease = self._of(number)
        self._holder[number] = worker
        self._leased += lease.samples
        return lease

    def finish(self, worker: int, numbers: Iterable[int]) -> None:
        """Mark chunks as trained on by the worker, except for those that it lost when it was considered dead."""
        for number in numbers:
            if self._take(worker, number):
                self._done.add(number)
                self.done_samples += self._of(number).samples

    def give_back(self, worker: int, numbers: Iterable[int]) -> None:
        """Return chunks that the worker has not trained on for others."""
        taken = [number for number in sorted(numbers) if self._take(worker, number)]
        self._returned.extendleft(reversed(taken))

    def leave(self, worker: int, dead: bool) -> None:
        """Return the chunks of a worker that leaves; those of a dead one are lost if the guarantee says so."""
        held = [number for number, holder in self._holder.items() if holder == worker]
        if not dead or self.guarantee == "at_least_once":
            self.give_back(worker, held)
            return
        for number in held:
            self._take(worker, number)
            self._lost.add(number)
            self.lost_samples += self._of(number).samples

    # ---- state ----------------------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """True if :meth:`lease` would return a chunk."""
        if self.limit is not None and self.done_samples + self._leased >= self.limit:
            return False
        return bool(self._returned) or self._next < self._chunks

    @property
    def is_settled(self) -> bool:
        """True if no chunk is available or held."""
        return not self._holder and not self.has_more

    @property
    def is_complete(self) -> bool:
        """True if every chunk is done or lost."""
        return self.done_samples + self.lost_samples == self.samples

    def used(self) -> list[tuple[int, int]]:
        """Return positions ``[first, last)`` in the order that must not be read again: of done or lost chunks."""
        runs: list[tuple[int, int]] = []
        for first, last in sorted([*self._done.runs(), *self._lost.runs()]):
            start, end = self._of(first).first, self._of(last - 1).last
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, end))
        return runs

    def _of(self, number: int) -> Lease:
        return Lease(number, number * self.chunk, min((number + 1) * self.chunk, self.samples))

    def _take(self, worker: int, number: int) -> bool:
        """End a lease, and return whether it was this worker's."""
        if self._holder.get(number) != worker:
            return False
        del self._holder[number]
        self._leased -= self._of(number).samples
        return True


class _Chunks:
    """A set of numbers, most of which are consecutive from 0."""

    def __init__(self) -> None:
        self._from_zero = 0  # all below
        self._others: set[int] = set()

    def add(self, number: int) -> None:
        self._others.add(number)
        while self._from_zero in self._others:
            self._others.remove(self._from_zero)
            self._from_zero += 1

    def runs(self) -> list[tuple[int, int]]:
        """Return ``[first, last)`` of consecutive numbers."""
        runs = [(0, self._from_zero)] if self._from_zero else []
        for number in sorted(self._others):
            if runs and runs[-1][1] == number:
                runs[-1] = (runs[-1][0], number + 1)
            else:
                runs.append((number, number + 1))
        return runs
