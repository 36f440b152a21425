"""Messages between a worker and a server: tensors of known shapes over a process group of the two alone.

A group of two per server, worker and incarnation fails alone: who dies takes no other link with it, and who comes again
gets a new one. The default process group is not touched. Nothing that is received is code: a message is a header, a
vector of float64, and at most one payload whose size the header or both ends know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.core.text.bounded import ContentError
from trainwright.strategies.contract.communication.meter import count_sent

# What a CommunicationMeter knows these bytes under: pushed by workers, pulled from servers.
AXIS = "server"
LOOPBACK = "127.0.0.1"
# For both ends to come; and for a message, which may be as long in coming as a validation or a save takes. A recv that
# times out closes the pair for good, and one whose peer has died fails at once whatever the timeout.
MEETING = timedelta(seconds=120)
PATIENCE = timedelta(days=30)
# For what follows a header at once, and for the first header of a link.
COMING = timedelta(minutes=30)
# Tags: a header and the payload after it are received at the same time, and so are parts, which count from PART on.
HEADER, PAYLOAD = 0, 1
PART = 8


class LinkError(ConnectionError):
    """The other end of a link is gone."""


class Device:
    """The network interface over which links are made; give one to all links of a process.

    Args:
        interface: its name; ``None``: the loopback address, which other machines do not reach.
    """

    def __init__(self, interface: str | None = None) -> None:
        make = dist.ProcessGroupGloo.create_device
        self.gloo: Any = make(hostname=LOOPBACK) if interface is None else make(interface=interface)


class Link:
    """One end of a link.

    Args:
        store: where the ends meet; a client of its own, since a wait in one thread would block others on it.
        name: of the link, never used before.
        serves: whether this is the server's end.
        device: see :class:`Device`.
        lost: makes what is raised, here and later, if the other end does not come or is gone.

    Raises:
        LinkError: if the other end does not come.
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
        """Sent so far."""
        try:
            store_of_link = dist.PrefixStore(name, store)
            self._group: Any = gloo(store_of_link, 1 - self._peer, 2, options)
        except RuntimeError as error:
            raise lost(str(error).splitlines()[0]) from None
        self._lost = lost

    def send(self, tensor: Tensor, tag: int) -> Sending:
        """Begin to send; ``tensor`` must stay as it is until that has ended.

        Raises:
            LinkError: if the other end is gone.
        """
        self.messages, self.sent_bytes = self.messages + 1, self.sent_bytes + tensor.nbytes
        count_sent(AXIS, "push" if self._peer == 0 else "pull", tensor.nbytes)
        return self._begin("send", tensor, tag)

    def receive(self, tensor: Tensor, tag: int) -> Sending:
        """Begin to receive into ``tensor``.

        Raises:
            LinkError: if the other end is gone.
        """
        return self._begin("recv", tensor, tag)

    def _begin(self, what: str, tensor: Tensor, tag: int) -> Sending:
        if self._group is None:
            raise self._lost("the link is closed")
        if tensor.numel() == 0:
            return Sending(None, self._lost)
        try:
            return Sending(getattr(self._group, what)([tensor], self._peer, tag), self._lost)
        except RuntimeError as error:
            raise self._lost(str(error).splitlines()[0]) from None

    def close(self) -> None:
        """Hang up: the other end hears of it at once. Nothing may be on its way."""
        self._group = None


class Sending:
    """A message on its way."""

    def __init__(self, work: Any, lost: Callable[[str], Exception]) -> None:
        self._work, self._lost = work, lost

    def wait(self, patience: timedelta = PATIENCE) -> None:
        """Until it has come or gone; after ``patience`` the link is lost.

        Raises:
            LinkError: if the other end is gone.
        """
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait(patience)
        except RuntimeError as error:
            raise self._lost(str(error).splitlines()[0]) from None


def header(size: int, **fields: float) -> Tensor:
    """A header of ``size`` numbers, the named ones first in the order of :data:`FIELDS`."""
    tensor = torch.zeros(size, dtype=torch.float64)
    for name, value in fields.items():
        tensor[FIELDS[name]] = value
    return tensor


FIELDS = {
    "operation": 0,  # of a request; of a reply its status
    "hold": 1,  # answer with the norm, step when that is said
    "coefficient": 2,  # that gradients are multiplied by
    "clip_value": 3,  # that their elements are clamped to, after that; 0: not at all
    "vote": 4,
    "bytes": 5,  # of the payload, where it is not known
    "text": 6,  # bytes of it that are JSON
    "digest": 7,
    "clock": 8,
    "staleness": 9,
    "proof": 10,  # that a worker knows the secret of the run, see Meeting.proof
    "quiet": 11,  # answer a step without parameters
    "parts": 13,  # whether the gradient has come in parts
    "pulls_parts": 14,  # whether parameters are to be sent in parts
    "returns": 12,  # how often lost workers have come again, at a meeting
    "notice": 16,  # that the run is to end, see ending.py; 0: none
    "notice_age": 17,
    "steps_left": 18,
    "messages": 19,  # that a server has sent so far
    "sent": 20,  # bytes of these
    "wanted": 21,  # whether the first worker should offer its state to those that come again
}
FIXED = max(FIELDS.values()) + 1


def field(tensor: Tensor, name: str) -> float:
    """One field of a header."""
    return float(tensor[FIELDS[name]])


def whole(tensor: Tensor, name: str) -> int:
    """One field of a header that is a whole number, 0 or more.

    Raises:
        ContentError: if it is none.
    """
    value = field(tensor, name)
    if not (0 <= value < 2**53 and value.is_integer()):
        raise ContentError(f"{name}={value} in a header (allowed: whole numbers from 0 on)")
    return int(value)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Have whatever a malformed message makes its reader raise be a :class:`ContentError`, the fault of who sent it."""
    try:
        yield
    except ContentError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise ContentError(f"{what} cannot be read: {error}") from error
