"""Where the processes of a run meet: torch's store, listening at the address that was asked for instead of at all."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import TCPStore

if TYPE_CHECKING:  # takes seconds to load, and the process that launches ranks has no use for it
    from lightning.fabric.plugins import ClusterEnvironment

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface of each backend; the user may decide them."""


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens at one address.

    Args:
        address: or name of this machine.
        port: TCP port; 0 = a free one.

    Raises:
        OSError: if another process listens there, or this machine does not have the address.
    """
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def first_store(environment: ClusterEnvironment | None, nodes: int) -> TCPStore | None:
    """Open the store at which the ranks meet, if this is the rank that has to; torch's would listen on every interface.

    torch shares the store that this process has at the same port already: keep it until the ranks have met.

    Args:
        environment: of the strategy.
        nodes: machines of the run.

    Returns:
        ``None`` on the other ranks, and where the address does not tell at which interface to listen.
    """
    if environment is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if environment.node_rank() or environment.local_rank():
        return None
    return store_at(environment.main_address, environment.main_port, nodes)


def store_at(address: str, port: int, nodes: int) -> TCPStore | None:
    """Open a store that torch shares, see :func:`first_store`."""
    if nodes > 1 and is_loopback(address):
        return None  # the name of this machine stands for the machine itself here, and for its address elsewhere
    with suppress(OSError):  # torch says what is wrong, or shares the store that is there already
        listener = listen_at(address, port)
        number = listener.getsockname()[1]
        return TCPStore(
            address,
            number,
            is_master=True,
            timeout=timedelta(minutes=30),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    return None


def is_loopback(address: str) -> bool:
    """Whether an address, or what a name stands for, is of this machine alone."""
    with suppress(OSError):
        return ipaddress.ip_address(socket.getaddrinfo(address, None)[0][4][0]).is_loopback
    return False


def loopback_interfaces() -> dict[str, str]:
    """Variables by which backends listen on the loopback interface, unless the user has decided it.

    Otherwise they listen at the address that the name of the machine stands for, open to the network.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return {} if loopback is None else {name: os.environ.get(name, loopback) for name in INTERFACES}
