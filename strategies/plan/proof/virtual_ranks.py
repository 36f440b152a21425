"""Virtual ranks: threads of this process that act as ranks of a process group, on the CPU.

Used to try engines without a process group. One thread runs at a time, until its next collective; once all have called
it, they get its result. So the order is deterministic, and an exception on one rank ends all.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def run_virtual_ranks(size: int, work: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
    """Call ``work(group)`` as every rank of a group; return the results by rank.

    All ranks start with the caller's random state, which is restored.

    Args:
        size: of the group.
        work: may call the collectives that engines use on its group, the same on all ranks.

    Raises:
        RuntimeError: if ranks call different collectives, or some return while others wait.
        Exception: the first that a rank raised.
    """
    states = [(torch.get_rng_state(), random.getstate())] * size
    ranks = [_Rank(index, size, work) for index in range(size)]
    before = states[0]
    try:
        while True:
            for index, rank in enumerate(ranks):
                _set_random(states[index])
                rank.resume()
                states[index] = (torch.get_rng_state(), random.getstate())
                if rank.error is not None:
                    raise rank.error
            if all(rank.ended for rank in ranks):
                return [rank.result for rank in ranks]
            calls = [rank.call for rank in ranks]
            if any(rank.ended for rank in ranks) or len({call[0] for call in calls}) > 1:
                raise RuntimeError(f"ranks call different collectives: {', '.join(call[0] for call in calls)}")
            _COLLECTIVES[calls[0][0]]([call[1] for call in calls], [call[2] for call in calls])
    finally:
        _set_random(before)
        for rank in ranks:
            rank.abort()


def _set_random(state: tuple[Tensor, Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])


class _Aborted(BaseException):
    """Raised in a rank to end it."""


class _Rank:
    """A thread that runs between :meth:`resume` and its next collective."""

    def __init__(self, index: int, size: int, work: Callable[[dist.ProcessGroup], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self.call: tuple[str, Any, Any] = ("nothing", None, None)
        self._aborted = False
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        group = _VirtualGroup(index, size, self)
        self._thread = threading.Thread(target=self._run, args=(work, group), daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Run until the next collective or the end."""
        if not self.ended:
            self._mine.release()
            self._theirs.acquire()

    def abort(self) -> None:
        """End the thread."""
        self._aborted = True
        while not self.ended:
            self.resume()
        self._thread.join()

    def wait_for(self, kind: str, out: Any, given: Any) -> _Done:
        """Wait in the rank's thread until all ranks have called this collective and its result is available."""
        self.call = (kind, out, given)
        self._theirs.release()
        self._mine.acquire()
        if self._aborted:
            raise _Aborted
        return _Done()

    def _run(self, work: Callable[[dist.ProcessGroup], Any], group: dist.ProcessGroup) -> None:
        self._mine.acquire()
        try:
            if not self._aborted:
                self.result = work(group)
        except _Aborted:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._theirs.release()


def _all_reduce(outs: list[Tensor], _: list[Any]) -> None:
    total = torch.stack(outs).sum(0)
    for out in outs:
        out.copy_(total)


def _all_gather(outs: list[Tensor], given: list[Tensor]) -> None:
    for out in outs:
        out.copy_(torch.stack(given).view_as(out))


def _reduce_scatter(outs: list[Tensor], given: list[Tensor]) -> None:
    for out, part in zip(outs, torch.stack(given).sum(0).chunk(len(outs)), strict=True):
        out.copy_(part.view_as(out))


def _all_to_all(outs: list[Tensor], given: list[Tensor]) -> None:
    rows = [tensor.chunk(len(outs)) for tensor in given]
    for index, out in enumerate(outs):
        out.copy_(torch.cat([row[index] for row in rows]).view_as(out))


_COLLECTIVES: dict[str, Callable[[list[Any], list[Any]], None]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
}


class _VirtualGroup(dist.ProcessGroup):
    """A process group of virtual ranks; sums only."""

    def __init__(self, index: int, size: int, rank: _Rank) -> None:
        super().__init__(index, size)  # type: ignore[call-arg]
        self._rank = rank

    def allreduce(self, tensors: list[Tensor], _: Any = None) -> _Done:  # type: ignore[override]
        return self._rank.wait_for("all-reduce", tensors[0].detach(), None)

    def _allgather_base(self, out: Tensor, given: Tensor, _: Any = None) -> _Done:  # type: ignore[override]
        return self._rank.wait_for("all-gather", out.detach(), given.detach())

    def _reduce_scatter_base(self, out: Tensor, given: Tensor, _: Any = None) -> _Done:  # type: ignore[override]
        return self._rank.wait_for("reduce-scatter", out.detach(), given.detach())

    def alltoall_base(self, out: Tensor, given: Tensor, *_: Any) -> _Done:  # type: ignore[override]
        return self._rank.wait_for("all-to-all", out.detach(), given.detach())

    # Names in torch 2.13.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it
        return "virtual"


class _Done:
    """A completed collective."""

    def wait(self, *_: Any) -> bool:
        return True
