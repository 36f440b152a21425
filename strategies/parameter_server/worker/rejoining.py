"""How a worker that is started anew takes the place of one that was lost, while the others go on.

1. Servers hear the end of the lost worker's links. Others do not wait for it in steps, but at meetings they do.
2. The new process builds module and optimizer by itself, alone in a process group of its own, and links itself to the
   servers: it starts at the clock of the slowest. Where workers make steps together, they wait for it from here on.
3. It takes the state of the run (loops, schedulers, callbacks; not what servers have) that the first rank offers: as it
   was when the step of that clock began, or an earlier one where the first rank makes no steps any more.
4. At the next meeting all ranks make the process group of all ranks anew, as it had lost a member.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.memory.replicas import pack, unpack
from trainwright.checkpoint.memory.snapshots import Snapshot
from trainwright.checkpoint.memory.transfer import mark_transferred
from trainwright.checkpoint.write.save import Content
from trainwright.checkpoint.write.staging import Staging
from trainwright.strategies.contract.groups import destroy_groups
from trainwright.strategies.parameter_server.messages.wire import COMING, HEADER, PAYLOAD, Device, Link, reading
from trainwright.strategies.parameter_server.options import INCARNATION
from trainwright.strategies.parameter_server.server.meeting import ServerMeeting

# An offer costs at most this part of the time, while nobody needs it.
_PART = 0.005
# Where the first rank says at which meeting servers and workers of this run find each other.
_PLACE = "parameter_server/place"
_LENGTHS = 2
# The name of the phase with which a micro-batch begins.
_STEP_BEGINS = "data"


def incarnation() -> int | None:
    """How often this rank was started before; ``None``: lost ranks are not started anew."""
    given = os.environ.get(INCARNATION)
    return None if given is None else int(given)


# ---- the state that a new worker takes up ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """A copy of the first rank's state of the run.

    Args:
        clock: steps that its worker had made.
        header: everything but tensors, as bytes.
        block: the tensors' memory.
    """

    clock: int
    header: Tensor
    block: Tensor

    @classmethod
    def of(cls, clock: int, content: Content, step: int) -> Offer:
        """Copy what a rank contributes to a state.

        Args:
            clock: steps that its worker has made.
            content: complete, see ``complete`` of ``strategy.run_state``.
            step: optimizer steps done.
        """
        staged = Staging().stage(content.tensors)  # memory of its own: an earlier offer may be on its way
        staged.wait()
        return cls(clock, pack(content, staged.slots, step), staged.block)

    @classmethod
    def receive(cls, clock: int, link: Link) -> Offer:
        """What :meth:`give` sends, from a worker that has made so many steps.

        Raises:
            LinkError: if the other end is gone.
        """
        return cls(clock, *_received(link))

    def give(self, link: Link) -> None:
        """Send it.

        Raises:
            LinkError: if the other end is gone.
        """
        lengths = torch.tensor([self.header.numel(), self.block.numel()], dtype=torch.float64)
        link.send(lengths, HEADER).wait()
        for part in (self.header, self.block):
            link.send(part, PAYLOAD).wait()


def take(meeting: ServerMeeting, worker: int, device: Device) -> Snapshot:
    """Take the state of the run that the first server has for a worker that comes again.

    Raises:
        LinkError: if the server is gone.
    """
    link = Link(meeting.client(), meeting.come(0, worker, wants_state=True), False, device)
    try:
        return mark_transferred(unpack(*_received(link)))
    finally:
        link.close()


def _received(link: Link) -> tuple[Tensor, Tensor]:
    lengths = torch.empty(_LENGTHS, dtype=torch.float64)
    link.receive(lengths, HEADER).wait(COMING)
    with reading("the size of a state"):
        head, block = (torch.empty(int(length), dtype=torch.uint8) for length in lengths)
    for part in (head, block):
        link.receive(part, PAYLOAD).wait(COMING)
    return head, block


class WorkerPace:
    """When to copy the state for workers that may come.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, float] | None = None

    def is_due(self, needed: bool) -> bool:
        """Whether to copy at the beginning of this step.

        Args:
            needed: somebody waits for a copy, or would find none.
        """
        if needed or self._last is None:
            return True
        end, cost = self._last
        return self._clock() - end > cost / _PART

    def copied(self, begin: float) -> None:
        """A copy was begun at ``begin``, and is done."""
        now = self._clock()
        self._last = (now, now - begin)

    @property
    def now(self) -> float:
        """The clock."""
        return self._clock()


def keep_offering(trainer: Any, keeper: Any, state: Callable[[], Content]) -> Callable[[str], None]:
    """Keep a copy of the first rank's state for workers that come again, from where steps begin.

    Args:
        trainer: whose phases are heard.
        keeper: takes the copy, and knows whether it is wanted: the first server, or a client of it.
        state: makes it.

    Returns:
        What is to be called with the name of each phase that begins.
    """
    pace, last = WorkerPace(), -1

    def hear(phase: str) -> None:
        nonlocal last
        if phase != _STEP_BEGINS or trainer.global_step == last:
            return
        last = trainer.global_step
        if pace.is_due(keeper.wants_offer):
            begin = pace.now
            keeper.offer(state(), trainer.global_step)
            pace.copied(begin)

    return hear


# ---- who is lost -----------------------------------------------------------------------------------------------------


class LostWorker:
    """The workers that a server waits for at meetings, because they are started anew. Not safe between threads.

    Args:
        replaces: whether lost workers come again.
    """

    def __init__(self, replaces: bool) -> None:
        self._replaces = replaces
        self._lost: set[int] = set()
        self._without_state: set[int] = set()
        self.returns = 0
        """How often a lost one has come again."""
        self.offer: Offer | None = None
        """What they are given; with the first server alone."""

    @property
    def any_lost(self) -> bool:
        """Whether a meeting has to wait."""
        return bool(self._lost)

    @property
    def wanted(self) -> bool:
        """Whether a fresh offer is needed soon."""
        return bool(self._lost or self._without_state)

    def lose(self, worker: int) -> None:
        """A worker's links have broken."""
        if self._replaces:
            self._without_state.discard(worker)
            self._lost.add(worker)

    def come(self, worker: int) -> None:
        """A worker has linked itself to the server."""
        if worker in self._lost:
            self._lost.remove(worker)
            self._without_state.add(worker)
            self.returns += 1

    def has_state(self, worker: int) -> None:
        """A worker has taken the offer."""
        self._without_state.discard(worker)


# ---- the process group of all ranks ----------------------------------------------------------------------------------


def meet_alone() -> None:
    """Make the process group of all ranks one of this process alone, until it meets the others."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def meet_anew(
    store: dist.Store, name: str, rank: int, size: int, backend: str | None, timeout: timedelta | None
) -> None:
    """Leave the process group of all ranks, which has lost a member, and make it anew.

    Args:
        store: of the run.
        name: of the group, never used before.
        rank: of this process.
        size: number of all ranks.
        backend: of the group; ``None``: torch's choice.
        timeout: of its collectives; ``None``: torch's.
    """
    destroy_groups()
    own = dist.PrefixStore(name, store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)


def run_store() -> dist.Store:
    """A connection of its own to the store of the run, which outlives any process group."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(minutes=5))


def tell_place(store: dist.Store, prefix: str) -> None:
    """Say where servers and workers meet in this fit."""
    store.set(_PLACE, prefix)


def told_place(store: dist.Store) -> str:
    """Where servers and workers meet in the fit that is under way."""
    prefix: str = store.get(_PLACE).decode()
    return prefix
