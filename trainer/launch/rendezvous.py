"""Where the ranks of one machine meet: a store of the launching process on the loopback interface."""

import socket
from datetime import timedelta
from types import TracebackType

from torch.distributed import TCPStore

ADDRESS = "127.0.0.1"


class LoopbackStore:
    """A store for the ranks of this machine, open until it is closed.

    torch's own rendezvous listens on every interface of the machine, and chooses the port before it binds it, so that
    two runs may choose the same. Here the launching process binds the port itself, to the loopback interface alone, and
    the ranks are its clients. Every attempt gets a new store: ranks never read addresses of dead ones.

    Args:
        port: TCP port; None = a free one.
        timeout: how long a rank waits for the others.

    Raises:
        OSError: if another process listens on the port.
    """

    def __init__(self, port: int | None = None, timeout: timedelta = timedelta(minutes=30)) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((ADDRESS, port or 0))
            listener.listen()
            self.port: int = listener.getsockname()[1]
            self._store: TCPStore | None = TCPStore(
                ADDRESS,
                self.port,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    def __enter__(self) -> "LoopbackStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def store(self) -> TCPStore:
        """The store itself, for what the launching process has to say to the ranks."""
        assert self._store is not None, "the store is closed"
        return self._store

    def close(self) -> None:
        """Free the port; ranks that still live can no longer meet."""
        self._store = None
