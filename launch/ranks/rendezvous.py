"""Where ranks meet: a store of the launching process on the loopback interface, or one of rank 0."""

from datetime import timedelta

from torch.distributed import TCPStore

from trainwright.core.processes.rendezvous import listen_at

ADDRESS = "127.0.0.1"


class LocalStore:
    """A store in this process, open until it is closed.

    torch's own rendezvous listens on every interface of the machine, and chooses the port before it binds it, so that
    two runs may choose the same. Here the process binds the port itself, to one address alone, and the ranks are its
    clients. Every attempt gets a new store: ranks never read addresses of dead ones.

    Args:
        port: TCP port; None = a free one.
        address: to listen at; the loopback interface unless other machines shall reach it.
        told: how the others call that address; None = the same.
        timeout: how long a rank waits for the others.

    Raises:
        OSError: if another process listens on the port.
    """

    def __init__(
        self,
        port: int | None = None,
        address: str = ADDRESS,
        told: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        with listen_at(address, port or 0) as listener:
            self.address = told or address
            """How the ranks call it."""
            self.port: int = listener.getsockname()[1]
            """Its port."""
            self._store: TCPStore | None = TCPStore(
                self.address,
                self.port,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    def __enter__(self) -> "LocalStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def store(self) -> TCPStore:
        """The store itself."""
        assert self._store is not None, "the store is closed"
        return self._store

    def close(self) -> None:
        """Free the port; ranks that still live can no longer meet."""
        self._store = None
