"""Replacement of a lost worker while the others keep training.

1. Servers detect the lost links. Others do not wait for the worker in steps, but at meetings they do.
2. The restarted process builds module and optimizer alone, in a process group of its own, and connects to the servers
at the slowest clock. Synchronous workers wait for it from now on.
3. It receives the state of the run (loops, schedulers, callbacks; not the servers' state) offered by the first rank: as
of the start of that clock's step, or earlier if the first rank makes no more steps.
4. At the next meeting all ranks rebuild the process group, which lost a member.
"""

from __future__ import annotations

import math
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
from trainwright.strategies.parameter_server.messages.wire import HEADER, PAYLOAD, Device, Link, reading
from trainwright.strategies.parameter_server.options import INCARNATION
from trainwright.strategies.parameter_server.server.rendezvous import ServerRendezvous

# Fraction of the time spent on offers that are not needed.
_PART = 0.005
# Key of the current rendezvous prefix in the run's store.
_PLACE = "parameter_server/place"
# Phase at the start of a micro-batch.
_STEP_BEGINS = "data"


def incarnation() -> int | None:
    """Return how often this rank was restarted; ``None``: lost ranks are not restarted individually."""
    given = os.environ.get(INCARNATION)
    return None if given is None else int(given)


# ---- state for rejoining workers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """Copy of the first rank's state of the run.

    Args:
        header: everything but tensors, as bytes.
        block: the tensors' memory.
    """

    header: Tensor
    block: Tensor

    @classmethod
    def of(cls, content: Content, step: int) -> Offer:
        """Copy the state of a rank.

        Args:
            content: complete, see ``complete`` of ``strategy.run_state``.
            step: optimizer steps done.
        """
        staged = Staging().stage(content.tensors)  # new memory: an earlier offer may be in flight
        staged.wait()
        return cls(pack(content, step), staged.block)

    @classmethod
    def receive(cls, link: Link) -> Offer:
        """Receive the message of :meth:`give`.

        Raises:
            LinkError: if the other end is gone.
        """
        lengths = link.fetch(torch.empty(2, dtype=torch.float64), HEADER)
        with reading("the size of a state"):
            header, block = (torch.empty(int(length), dtype=torch.uint8) for length in lengths)
        return cls(link.fetch(header), link.fetch(block))

    def give(self, link: Link) -> None:
        """Send the offer.

        Raises:
            LinkError: if the other end is gone.
        """
        lengths = torch.tensor([self.header.numel(), self.block.numel()], dtype=torch.float64)
        link.send(lengths, HEADER).wait()
        for part in (self.header, self.block):
            link.send(part, PAYLOAD).wait()


def take(meeting: ServerRendezvous, worker: int, device: Device) -> Snapshot:
    """Receive the state of the run from the first server, as a rejoining worker.

    Raises:
        LinkError: if the server is gone.
    """
    link = Link(meeting.client(), meeting.announce(0, worker, wants_state=True), False, device)
    try:
        offer = Offer.receive(link)
        return mark_transferred(unpack(offer.header, offer.block))
    finally:
        link.close()


def keep_offering(trainer: Any, keeper: Any, state: Callable[[], Content]) -> Callable[[str], None]:
    """Offer the first rank's state at the start of steps.

    Args:
        trainer: whose phases are observed.
        keeper: receives offers and knows whether one is wanted: the first server, or its client.
        state: creates the copy.

    Returns:
        A listener for phase names.
    """
    last, offered, cost = -1, -math.inf, 0.0

    def hear(phase: str) -> None:
        nonlocal last, offered, cost
        if phase != _STEP_BEGINS or trainer.global_step == last:
            return
        last, begin = trainer.global_step, time.monotonic()
        if keeper.wants_offer or begin - offered > cost / _PART:
            keeper.offer(state(), trainer.global_step)
            offered = time.monotonic()
            cost = offered - begin

    return hear


# ---- lost workers ----------------------------------------------------------------------------------------------------


class LostWorkers:
    """Lost workers that are restarted and that meetings wait for. Not thread-safe.

    Args:
        replaces: whether lost workers are restarted.
    """

    def __init__(self, replaces: bool) -> None:
        self._replaces = replaces
        self._lost: set[int] = set()
        self._without_state: set[int] = set()
        self.returns = 0
        """Number of rejoined workers."""
        self.offer: Offer | None = None
        """State for rejoining workers; on the first server only."""
        self.offered_at = 0
        """Clock of the worker that made it."""

    @property
    def any_lost(self) -> bool:
        """True if a meeting must wait."""
        return bool(self._lost)

    @property
    def wanted(self) -> bool:
        """True if a fresh offer is needed soon."""
        return bool(self._lost or self._without_state)

    def lose(self, worker: int) -> None:
        """Record lost links of a worker."""
        if self._replaces:
            self._without_state.discard(worker)
            self._lost.add(worker)

    def come(self, worker: int) -> None:
        """Record the connection of a worker."""
        if worker in self._lost:
            self._lost.remove(worker)
            self._without_state.add(worker)
            self.returns += 1

    def has_state(self, worker: int) -> None:
        """Record that a worker received the offer."""
        self._without_state.discard(worker)


# ---- process group ---------------------------------------------------------------------------------------------------


def init_single_process_group() -> None:
    """Create a process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def run_store() -> dist.Store:
    """Return a new connection to the store of the run, which outlives process groups."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(minutes=5))


def publish_prefix(store: dist.Store, prefix: str) -> None:
    """Publish the rendezvous prefix of this fit."""
    store.set(_PLACE, prefix)


def current_prefix(store: dist.Store) -> str:
    """Return the rendezvous prefix of the current fit."""
    prefix: str = store.get(_PLACE).decode()
    return prefix
