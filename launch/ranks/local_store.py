"""Stores for the rendezvous of ranks."""

from datetime import timedelta

from torch.distributed import TCPStore

from trainwright.core.processes.rendezvous import listen_at

ADDRESS = "127.0.0.1"


class LocalStore:
    """A TCP store in this process.

    torch's own rendezvous listens on every interface and chooses the port before it binds it, so that two runs may
    choose the same. Here the process binds the port itself, to one address only, and the ranks are its clients. Every
    attempt has a new store, so ranks never read addresses of dead ones.

    Args:
        port: TCP port; None = a free one.
        address: to listen at; the loopback interface unless other machines must reach it.
        public_address: that address as the others reach it; None = the same.
        timeout: of a rank that waits for the others.

    Raises:
        OSError: if another process listens on the port.
    """

    def __init__(
        self,
        port: int | None = None,
        address: str = ADDRESS,
        public_address: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        with listen_at(address, port or 0) as listener:
            self.address = public_address or address
            """The address for the ranks."""
            self.port: int = listener.getsockname()[1]
            """The port."""
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
        """Free the port; ranks can no longer connect."""
        self._store = None
