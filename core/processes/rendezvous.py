"""Rendezvous of a run's processes at torch's TCPStore, listening at the requested address, not all interfaces."""

from __future__ import annotations

import atexit
import gc
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import TCPStore

if TYPE_CHECKING:  # takes seconds to import, and the launching process does not need it
    from lightning.fabric.plugins import ClusterEnvironment

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that select each backend's network interface; values set by the user win."""


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens at one address.

    Args:
        address: or name of this machine.
        port: TCP port; 0 = a free one.

    Raises:
        OSError: if the port is taken, or the address is not of this machine.
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
    """Open the rendezvous store if this rank hosts it; torch's own would listen on every interface.

    torch reuses a store at the same port in this process: keep the result until the ranks have met.

    Args:
        environment: of the strategy.
        nodes: machines of the run.

    Returns:
        ``None`` on the other ranks, and where the address does not determine an interface.
    """
    if environment is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if environment.node_rank() or environment.local_rank():
        return None
    return store_at(environment.main_address, environment.main_port, nodes)


def store_at(address: str, port: int, nodes: int) -> TCPStore | None:
    """Open a store that torch reuses, see :func:`first_store`."""
    if nodes > 1 and is_loopback(address):
        return None  # the machine's own name resolves to loopback here only
    with suppress(OSError):  # torch reports the error, or reuses an existing store
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
    """Return whether an address or host name is a loopback address."""
    with suppress(OSError):
        return ipaddress.ip_address(socket.getaddrinfo(address, None)[0][4][0]).is_loopback
    return False


def loopback_interfaces() -> dict[str, str]:
    """Return variables that make backends listen on the loopback interface, unless the user has set them.

    By default they listen at the address of the host name, which the network can reach.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return {} if loopback is None else {name: os.environ.get(name, loopback) for name in INTERFACES}


@contextmanager
def rendezvous(environment: ClusterEnvironment | None, nodes: int) -> Iterator[None]:
    """Provide the store while Lightning creates the process group.

    Args:
        environment: of the cluster; ``None``: one process.
        nodes: number of machines.

    Raises:
        RuntimeError: if another program uses the port.
    """
    store = None if dist.is_initialized() else first_store(environment, nodes)
    if nodes == 1 and environment is not None and is_loopback(environment.main_address):
        os.environ.update(loopback_interfaces())
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ.get("MASTER_PORT", "of this run")
        raise RuntimeError(
            f"The ranks cannot meet at port {port}: another program uses it. Free it, or choose another one with "
            "launch.port=<number> (in a plain script: the environment variable MASTER_PORT)."
        ) from error
    del store  # torch holds its own reference now
    atexit.register(_destroy_group)


def _destroy_group() -> None:
    """Destroy a gloo group before the interpreter exits, which its threads would abort."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        gc.collect()  # DistributedDataParallel keeps a reference to the group
        dist.destroy_process_group()
