"""Rendezvous of ranks started by torchrun, anew for every attempt.

torchrun hands the store of its agent to the ranks. It outlives them: after a restart the ranks would read addresses of
dead ranks from it, and fail or wait for each other. (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in torchrun's environment
helps with some rendezvous backends, but the ranks cannot set it.) So rank 0 of each attempt opens a store of its own,
and the agent's store only holds its address. The ranks do not know the number of their attempt (each agent counts its
own restarts, and one that joins later starts at 0), so they may read the address of an earlier rank 0. They detect it:
nothing listens there, or its ranks have joined already.
"""

import json
import os
import socket
import time
from contextlib import closing
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore, rendezvous

from trainwright.core.processes.rendezvous import store_at
from trainwright.core.run.launcher import Launcher
from trainwright.launch.ranks.rendezvous import ADDRESS, LocalStore

STORE = "TRAINWRIGHT_STORE"
"""Variable with address and port, as JSON, of a store that lives as long as the run; torch's is not used then."""
HOST_ADDRESS = "TRAINWRIGHT_ADDRESS"
"""Variable with the address of this machine for other machines."""
_ADDRESS_KEY = "trainwright/meeting"
_JOINED = "trainwright/joined"
# Longest wait for the other ranks.
TIMEOUT = timedelta(minutes=5)
_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.1
# Keeps stores alive with the process: without an agent, the launcher's store is in rank 0 and others may still read it;
# and the process group uses the store that rank 0 has opened.
_kept: list[Any] = []


def meet(launcher: Launcher) -> Store:
    """Return a store for the ranks of this attempt only; the process group uses it, too.

    Args:
        launcher: of `detect_launcher`.

    Raises:
        TimeoutError: if rank 0 is not found within :data:`TIMEOUT`.
    """
    store = _launchers_store(launcher)
    _kept[:] = [store]
    if not _restarts_ranks():
        return store  # without restarts by the launcher, another attempt has other processes and another store
    if launcher.rank == 0:
        own = _open(launcher)
        _kept.append(own)
        own.store.add(f"{_JOINED}/0", 1)
        store.set(_ADDRESS_KEY, json.dumps([own.address, own.port]))
        _use_store(own.address, own.port)
        return own.store
    return _join(store, launcher.rank)


def _restarts_ranks() -> bool:
    """Return whether the launcher restarts ranks, and shares its own store with them."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _open(launcher: Launcher) -> LocalStore:
    """Open a store on rank 0: at an address that other machines reach, or on loopback for one machine."""
    address, public_address = ADDRESS, ADDRESS
    if HOST_ADDRESS in os.environ:
        address = public_address = os.environ[HOST_ADDRESS]
    elif launcher.world_size > launcher.local_world_size:
        address = public_address = _local_address()
        if address.startswith("127.") or address == "::1":
            # The machine's name resolves to loopback here, but to its address elsewhere.
            address, public_address = "0.0.0.0", os.environ["MASTER_ADDR"]  # noqa: S104 - other machines have to reach it
    return LocalStore(address=address, public_address=public_address, timeout=TIMEOUT)


def _local_address() -> str:
    """Return the address of this machine in the network of the agent's store."""
    to = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with closing(socket.create_connection(to, timeout=TIMEOUT.total_seconds())) as probe:
        return str(probe.getsockname()[0])


def _join(store: Store, rank: int) -> Store:
    """Return the store of this attempt's rank 0, on another rank."""
    end = time.monotonic() + TIMEOUT.total_seconds()
    while time.monotonic() < end:
        address, port = json.loads(store.get(_ADDRESS_KEY).decode())
        if _is_listening(address, port):
            found = TCPStore(address, port, is_master=False, timeout=TIMEOUT)
            if found.add(f"{_JOINED}/{rank}", 1) == 1:
                _use_store(address, port)
                return found
        time.sleep(_PAUSE_SECONDS)
    raise TimeoutError(f"rank {rank} has found no rank 0 within {TIMEOUT}; see its log, or that of torchrun")


def _is_listening(address: str, port: int) -> bool:
    """Return whether anything listens; a store client would retry for minutes."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _use_store(address: str, port: int) -> None:
    """Make the process group use this store."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    # Not the agent's store, but likewise one that rank 0 need not open.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def _launchers_store(launcher: Launcher) -> Store:
    """Return a client of the launcher's store."""
    if STORE in os.environ:
        host, number = json.loads(os.environ[STORE])
        return TCPStore(host, number, is_master=False, timeout=TIMEOUT)
    address, port = _address(launcher)
    listening = None
    if launcher.rank == 0 and not _restarts_ranks():
        listening = store_at(address, int(port), launcher.world_size // launcher.local_world_size)
    url = f"tcp://{address}:{port}?rank={launcher.rank}&world_size={launcher.world_size}"
    store: Store
    store, _, _ = next(iter(rendezvous(url, timeout=TIMEOUT)))
    del listening  # torch holds a reference by now
    return store


def _address(launcher: Launcher) -> tuple[str, str]:
    if launcher.name == "SLURM" and "MASTER_ADDR" not in os.environ:
        from lightning.pytorch.plugins.environments import SLURMEnvironment

        environment = SLURMEnvironment(auto_requeue=False)
        return environment.main_address, str(environment.main_port)
    return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
