"""Where ranks that torchrun has started meet, anew in every attempt.

torchrun hands the store of its agent to the ranks. The store outlives them: after a restart the ranks read in it where
those before them listened, connect to addresses that nobody answers at any more, and fail or wait for each other.
(``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in torchrun's environment helps with some kinds of rendezvous, but the ranks
cannot set it.) So rank 0 of each attempt opens a store of its own, and the agent's store says nothing but where it is.
Nothing tells the ranks which attempt theirs is (each agent counts its own restarts, and one that joins later begins at
0), so they may read where rank 0 of an earlier attempt was. Who comes there finds out: that rank 0 is dead, or its
ranks have come already.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore, rendezvous

from trainwright.core.processes.rendezvous import store_at
from trainwright.core.run.launcher import Launcher
from trainwright.launch.ranks.rendezvous import ADDRESS, LocalStore

STORE = "TRAINWRIGHT_STORE"
"""Variable with address and port, as JSON, of a store that lives as long as the run; torch's is then left alone."""
HOST_ADDRESS = "TRAINWRIGHT_ADDRESS"
"""Variable with the address of this machine by which the others reach it."""
_PLACE = "trainwright/meeting"
_JOINED = "trainwright/joined"
# Longest wait for the other ranks.
TIMEOUT = timedelta(minutes=5)
_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.1
# Stores live as long as the process: where no agent holds it, that of the launcher lives in rank 0, and the others may
# not have read in it yet; and the process group uses the one that rank 0 has opened.
_kept: list[Any] = []


def meet(launcher: Launcher) -> Store:
    """A store that the ranks of this attempt have for themselves; the process group is made with it, too.

    Args:
        launcher: as `detect_launcher` found it.

    Raises:
        TimeoutError: if rank 0 is not found within :data:`TIMEOUT`.
    """
    store = _launchers_store(launcher)
    _kept[:] = [store]
    if not is_elastic(os.environ):
        return store  # the launcher has started one attempt; another has other processes and another store
    if launcher.rank == 0:
        own = _open(launcher)
        _kept.append(own)
        own.store.add(f"{_JOINED}/0", 1)
        store.set(_PLACE, json.dumps([own.address, own.port]))
        _enter(own.address, own.port)
        return own.store
    return _join(store, launcher.rank)


def is_elastic(environment: Mapping[str, str]) -> bool:
    """Whether the launcher starts ranks again, and hands its own store to them."""
    return "TORCHELASTIC_RUN_ID" in environment


def _open(launcher: Launcher) -> LocalStore:
    """On rank 0: a store at an address that the other machines reach; on one machine, that only it reaches."""
    address, told = ADDRESS, ADDRESS
    if HOST_ADDRESS in os.environ:
        address = told = os.environ[HOST_ADDRESS]
    elif launcher.world_size > launcher.local_world_size:
        address = told = _own_address()
        if address.startswith("127.") or address == "::1":
            # The name of the machine stands for the machine itself here; elsewhere it is its address.
            address, told = "0.0.0.0", os.environ["MASTER_ADDR"]  # noqa: S104 - other machines have to reach it
    return LocalStore(address=address, told=told, timeout=TIMEOUT)


def _own_address() -> str:
    """The address of this machine in the network in which the agent's store is."""
    to = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with closing(socket.create_connection(to, timeout=TIMEOUT.total_seconds())) as probe:
        return str(probe.getsockname()[0])


def _join(store: Store, rank: int) -> Store:
    """On the other ranks: the store of rank 0 of this attempt."""
    end = time.monotonic() + TIMEOUT.total_seconds()
    while time.monotonic() < end:
        address, port = json.loads(store.get(_PLACE).decode())
        if _answers(address, port):
            found = TCPStore(address, port, is_master=False, timeout=TIMEOUT)
            if found.add(f"{_JOINED}/{rank}", 1) == 1:
                _enter(address, port)
                return found
        time.sleep(_PAUSE_SECONDS)
    raise TimeoutError(f"rank {rank} has found no rank 0 within {TIMEOUT}; its log, or that of torchrun, says why")


def _answers(address: str, port: int) -> bool:
    """Whether somebody listens; a client of a store would try again for minutes."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _enter(address: str, port: int) -> None:
    """Have the process group made here."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    # Not that of the agent; but a store that is there already, which rank 0 need not open.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def _launchers_store(launcher: Launcher) -> Store:
    """A client of the store that the launcher has told the ranks of."""
    if STORE in os.environ:
        host, number = json.loads(os.environ[STORE])
        return TCPStore(host, number, is_master=False, timeout=TIMEOUT)
    address, port = _address(launcher)
    listening = None
    if launcher.rank == 0 and not is_elastic(os.environ):
        listening = store_at(address, int(port), launcher.world_size // launcher.local_world_size)
    url = f"tcp://{address}:{port}?rank={launcher.rank}&world_size={launcher.world_size}"
    store: Store
    store, _, _ = next(iter(rendezvous(url, timeout=TIMEOUT)))
    del listening  # torch has shared it by now
    return store


def _address(launcher: Launcher) -> tuple[str, str]:
    if launcher.name == "SLURM" and "MASTER_ADDR" not in os.environ:
        from lightning.pytorch.plugins.environments import SLURMEnvironment

        environment = SLURMEnvironment(auto_requeue=False)
        return environment.main_address, str(environment.main_port)
    return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
