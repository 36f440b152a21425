"""Messages between a worker and a server: tensors over a process group of the two.

Each pair of server and worker incarnation has its own group of two, so that failures stay local and a restarted worker
gets a new link. The default process group is not used. Received data is never code: a message is a header, a vector of
float64, and at most one payload, whose size is in the header or known to both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.core.failures.error_text import first_line
from trainwright.core.text.bounded import ContentError
from trainwright.strategies.contract.communication.meter import count_sent

# Axis of these bytes in a CommunicationMeter.
AXIS = "server"
LOOPBACK = "127.0.0.1"
# Timeouts of the connection of a link, and of a message, which may take as long as a validation or a save. A recv that
# times out closes the pair for good; one whose peer has died fails at once.
MEETING = timedelta(seconds=120)
PATIENCE = timedelta(days=30)
# Timeout of payloads, and of the first header of a link.
COMING = timedelta(minutes=30)
# Tags: a header and its payload are received concurrently, as are parts, which count from PART on.
HEADER, PAYLOAD = 0, 1
PART = 8


class LinkError(ConnectionError):
    """Lost connection to the other end of a link."""


class Device:
    """Network interface of links; share one between all links of a process.

    Args:
        interface: its name; ``None``: the loopback address, which other machines cannot reach.
    """

    def __init__(self, interface: str | None = None) -> None:
        make = dist.ProcessGroupGloo.create_device
        self.gloo: Any = make(hostname=LOOPBACK) if interface is None else make(interface=interface)


class Link:
    """One end of a link.

    Args:
        store: for the rendezvous; a separate client, since a wait would block other threads.
        name: of the link, never used before.
        serves: whether this is the server's end.
        device: see :class:`Device`.
        lost: creates the exception for a missing or lost other end.

    Raises:
        LinkError: if the other end does not connect.
    """

    def __init__(
        self, store: dist.Store, name: str, serves: bool, device: Device, lost: Callable[[str], Exception] = LinkError
    ) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = MEETING
        options._devices = [device.gloo]
        options._threads = 1
        self._peer = 1 if serves else 0
        self.messages = self.sent_bytes = 0
        """Messages and bytes sent so far."""
        try:
            self._group: Any = gloo(dist.PrefixStore(name, store), 1 - self._peer, 2, options)
        except RuntimeError as error:
            raise lost(first_line(error)) from None
        self._lost = lost

    def send(self, tensor: Tensor, tag: int) -> Sending:
        """Start sending; ``tensor`` must not change until the end.

        Raises:
            LinkError: if the other end is gone.
        """
        self.messages, self.sent_bytes = self.messages + 1, self.sent_bytes + tensor.nbytes
        count_sent(AXIS, "push" if self._peer == 0 else "pull", tensor.nbytes)
        return self._begin("send", tensor, tag)

    def receive(self, tensor: Tensor, tag: int) -> Sending:
        """Start receiving into ``tensor``.

        Raises:
            LinkError: if the other end is gone.
        """
        return self._begin("recv", tensor, tag)

    def fetch(self, tensor: Tensor, tag: int = PAYLOAD, patience: timedelta = COMING) -> Tensor:
        """Receive into ``tensor`` and return it; after ``patience`` the link is lost.

        Raises:
            LinkError: if the other end is gone.
        """
        self.receive(tensor, tag).wait(patience)
        return tensor

    def _begin(self, what: str, tensor: Tensor, tag: int) -> Sending:
        if self._group is None:
            raise self._lost("the link is closed")
        if tensor.numel() == 0:
            return Sending(None, self._lost)
        try:
            return Sending(getattr(self._group, what)([tensor], self._peer, tag), self._lost)
        except RuntimeError as error:
            raise self._lost(first_line(error)) from None

    def close(self) -> None:
        """Disconnect: the other end notices at once. No message may be in flight."""
        self._group = None


class Sending:
    """Message in flight."""

    def __init__(self, work: Any, lost: Callable[[str], Exception]) -> None:
        self._work, self._lost = work, lost

    def wait(self, patience: timedelta = PATIENCE) -> None:
        """Wait for completion; after ``patience`` the link is lost.

        Raises:
            LinkError: if the other end is gone.
        """
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait(patience)
        except RuntimeError as error:
            raise self._lost(first_line(error)) from None


def header(size: int, **fields: float) -> Tensor:
    """Return a header of ``size`` numbers with the given :data:`FIELDS`."""
    tensor = torch.zeros(size, dtype=torch.float64)
    for name, value in fields.items():
        tensor[FIELDS[name]] = value
    return tensor


FIELDS = {
    "operation": 0,  # of a request; the status of a reply
    "hold": 1,  # reply with norms and wait for a commit
    "coefficient": 2,  # multiplies gradients
    "clip_value": 3,  # clamps their elements after that; 0: off
    "vote": 4,
    "bytes": 5,  # of the payload, if its size is not known
    "text": 6,  # JSON bytes of the payload
    "digest": 7,
    "clock": 8,
    "staleness": 9,
    "proof": 10,  # of the run's secret, see ServerRendezvous.proof
    "quiet": 11,  # no parameters in the reply to a step
    "parts": 13,  # the gradient was sent in parts
    "pulls_parts": 14,  # send parameters in parts
    "returns": 12,  # number of rejoined workers, at a meeting
    "notice": 16,  # that the run is to end, see clocks.py; 0: none
    "notice_age": 17,
    "steps_left": 18,
    "messages": 19,  # sent by a server so far
    "sent": 20,  # bytes of these
    "wanted": 21,  # the first worker should offer its state to rejoining workers
}
FIXED = max(FIELDS.values()) + 1


def field(tensor: Tensor, name: str) -> float:
    """Return one field of a header."""
    return float(tensor[FIELDS[name]])


def whole(tensor: Tensor, name: str) -> int:
    """Return one field of a header as a non-negative whole number.

    Raises:
        ContentError: if it is none.
    """
    value = field(tensor, name)
    if not (0 <= value < 2**53 and value.is_integer()):
        raise ContentError(f"{name}={value} in a header (allowed: whole numbers from 0 on)")
    return int(value)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise errors of reading a malformed message as :class:`ContentError`, the sender's fault."""
    try:
        yield
    except ContentError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise ContentError(f"{what} cannot be read: {error}") from error
