"""Where the ranks of one machine meet: a store of the launching process on the loopback interface."""

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

_ADDRESS = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """Rendezvous of one machine for torch's elastic agent.

    torch's own handlers listen on every interface of the machine, and choose the port of the ranks before they bind it,
    so that two runs may choose the same. Here the launching process binds the port itself, to the loopback interface
    alone, and the ranks are its clients. Every restart gets a new store: ranks never read addresses of dead ones.

    Args:
        run_id: any name that no other run of this moment has.
        port: TCP port; None = a free one.
        timeout: how long a rank waits for the others.
    """

    def __init__(self, run_id: str, port: int | None = None, timeout: timedelta = timedelta(minutes=30)) -> None:
        self._run_id = run_id
        self._port = port or 0
        self._timeout = timeout
        self._store: TCPStore | None = None
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        """The ranks connect to this store instead of opening one."""
        return True

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a new store; there is one agent, so nobody is waited for."""
        self._store = None  # frees the port for the next attempt
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_ADDRESS, self._port))
        listener.listen()
        port = listener.getsockname()[1]
        self._store = TCPStore(
            _ADDRESS,
            port,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        agents = PrefixStore("agent", self._store)
        return RendezvousInfo(agents, 0, 1, RendezvousStoreInfo(_ADDRESS, port))

    def is_closed(self) -> bool:
        """Whether no further attempt is possible."""
        return self._closed

    def set_closed(self) -> None:
        """Allow no further attempt."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """No other machine ever joins."""
        return 0

    def get_run_id(self) -> str:
        """The name given at the start."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        self._closed = True
        return True
