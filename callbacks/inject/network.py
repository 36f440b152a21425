"""Network faults."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.inject.fault import Fault
from trainwright.checkpoint.exchange.distinct import all_gather_values

_ESTABLISHED = "01"
_SOCKET = "socket:["
# An end of a connection: hexadecimal address as in /proc/net, with the port.
End = str


class Partition(Fault):
    """See :func:`trainwright.callbacks.inject.partition`."""

    def __init__(self, ranks: int | Sequence[int], at_step: int, times: int | None) -> None:
        super().__init__(None, at_step, times)
        self.ranks = frozenset([ranks] if isinstance(ranks, int) else ranks)
        self._places: list[Endpoint] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exchange the endpoints of ranks. A collective.

        Raises:
            ValueError: if there is nothing to cut.
        """
        super().on_train_start(trainer, pl_module)
        if not set(range(trainer.world_size)) - self.ranks or not self.ranks & set(range(trainer.world_size)):
            raise ValueError(f"{self.sentence} cuts nothing: all {trainer.world_size} rank(s) are on one side.")
        self._places = _places()

    def strikes(self, trainer: Trainer) -> bool:
        """Return whether this rank is cut off; shutting its end down closes the other one too."""
        return trainer.global_rank in self.ranks

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shut down the connections to the other side."""
        others = [place for rank, place in enumerate(self._places) if rank not in self.ranks]
        cut_off(self._places[trainer.global_rank], others)


def _places() -> list[Endpoint]:
    """Return the endpoints of all ranks, by rank. A collective."""
    addresses = {end.partition(":")[0] for end, _ in connections(os.getpid()).values()}
    own: Any = (socket.gethostname(), os.getpid(), tuple(sorted(addresses - _LOOPBACK)))
    return [Endpoint(*each) for each in all_gather_values(own)]


# Common to all machines.
_LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@dataclass(frozen=True)
class Endpoint:
    """The location of a rank.

    Args:
        host: name of the machine.
        pid: of its process.
        addresses: of the machine, as far as its connections show them.
    """

    host: str
    pid: int
    addresses: tuple[str, ...]


def cut_off(own: Endpoint, others: Collection[Endpoint]) -> int:
    """Shut down this process's TCP connections with other ranks.

    Args:
        own: this rank.
        others: ranks to cut off.

    Returns:
        The number of connections.
    """
    ends_here = {end for place in others if place.host == own.host for end, _ in connections(place.pid).values()}
    far = {address for place in others if place.host != own.host for address in place.addresses}
    count = 0
    for descriptor, (_, remote) in connections(os.getpid()).items():
        if remote in ends_here or remote.partition(":")[0] in far:
            count += _shut(descriptor, remote)
    return count


def _shut(descriptor: int, remote: End) -> bool:
    """Shut a connection down, unless its owner (a thread of gloo) has closed it since the lookup."""
    try:
        # A second descriptor of the same socket: closing it leaves its owner's open.
        copy = os.dup(descriptor)
    except OSError:
        return False
    try:
        connection = socket.socket(fileno=copy)
    except OSError:  # the number has been reused for a file
        os.close(copy)
        return False
    with connection, suppress(OSError):
        if connection.getpeername()[1] == int(remote.partition(":")[2], 16):  # not reused for another connection
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def connections(pid: int) -> dict[int, tuple[End, End]]:
    """Return the TCP connections of a process of this user: descriptor -> local and remote end."""
    ends = dict(_ends_by_inode(pid))
    found = {}
    links: list[Path] = []
    with suppress(OSError):  # the process has ended, or this is not Linux
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    for link in links:
        with suppress(OSError):  # closed in between
            target = os.readlink(link)
            if target.startswith(_SOCKET) and target[len(_SOCKET) : -1] in ends:
                found[int(link.name)] = ends[target[len(_SOCKET) : -1]]
    return found


def _ends_by_inode(pid: int) -> Iterator[tuple[str, tuple[End, End]]]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    yield fields[9], (_plain(fields[1]), _plain(fields[2]))


def _plain(end: End) -> End:
    """Return an IPv4-mapped address in IPv4 notation."""
    address, _, port = end.partition(":")
    if address.startswith("0000000000000000FFFF0000"):
        address = address[-8:]
    return f"{address}:{port}"
