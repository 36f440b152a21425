"""A thread that serves untrusted connections.

Message length and time are bounded, and an error closes only the connection that caused it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from trainwright.core.text.bounded import ContentError
from trainwright.core.text.messages import LONGEST

_log = logging.getLogger(__name__)
# Connections waiting to be accepted; beyond that the kernel makes clients retry after a second.
_BACKLOG = 1024
# Pause after a connection could not be accepted, as when the process is out of file descriptors.
_PAUSE_SECONDS = 0.05


class Peer(asyncio.Protocol):
    """One connection.

    Args:
        server: that has accepted it.

    Attributes:
        is_admitted: set it to let the connection stay idle.
        is_closed: whether it is closed.
    """

    transport: asyncio.Transport

    def __init__(self, server: MessageServer) -> None:
        self._server = server
        self.received = b""
        self.is_admitted = self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = transport  # type: ignore[assignment]
        self._server.begin(self)

    def data_received(self, data: bytes) -> None:
        """Handle what has arrived."""
        self._server.receive(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._server.close(self)


class MessageServer:
    """Receive messages in a background thread, and answer them.

    Args:
        handle: called in the thread with the connection and each message, without its terminator; an exception closes
            the connection.
        lost: called in the thread with each closed connection.
        name: of the thread; also used in the warning about a closed connection.
        host: address to listen on; by default only this machine can connect.
        port: TCP port; 0 = a free one.
        end: terminator of a message.
        longest: maximum bytes of a message.
        seconds: time limit of a message from its first byte, and of an unadmitted connection from its start.
        strangers: maximum unadmitted connections; beyond it the oldest is closed.

    Attributes:
        port: TCP port.

    Raises:
        OSError: if the address is unavailable.
    """

    def __init__(
        self,
        handle: Callable[[Peer, bytes], None],
        lost: Callable[[Peer], None] = lambda peer: None,
        *,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        end: bytes = b"\n",
        longest: int = LONGEST,
        seconds: float = 10.0,
        strangers: int = 64,
    ) -> None:
        self._handle, self._lost, self._name = handle, lost, name
        self._end, self._longest, self._seconds, self._strangers = end, longest, seconds, strangers
        self._peers: set[Peer] = set()
        self._due: dict[Peer, asyncio.TimerHandle] = {}  # ends of time limits, earliest first
        self._has_warned = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        close_in_children(self._listener)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start serving."""
        self._loop = asyncio.new_event_loop()
        self._accepting = self._loop.create_task(self._accept())
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close all connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._accepting.cancel)
            self._thread.join()

    # ---- for ``handle`` and ``lost`` ------------------------------------------------------------------------------

    def send(self, peer: Peer, message: bytes, last: bool = False) -> None:
        """Send bytes when the peer is ready for them; a closed connection is ignored.

        Args:
            peer: connection.
            message: with its terminator.
            last: close the connection afterwards.
        """
        if not peer.is_closed:
            peer.transport.write(message)
            if last:
                # Closing with unread input would reset the connection and lose the answer.
                peer.transport.write_eof()

    def close(self, peer: Peer) -> None:
        """Close a connection."""
        if not peer.is_closed:
            peer.is_closed = True
            self._peers.discard(peer)
            self._end_limit(peer)
            peer.transport.abort()
            self._lost(peer)

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._accepting)
        finally:
            self._listener.close()
            for peer in self._peers:
                peer.is_closed = True
                peer.transport.abort()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            close_in_children(connection)
            with suppress(OSError):  # already closed
                keep_alive(connection)
            await self._loop.connect_accepted_socket(partial(Peer, self), connection)

    def begin(self, peer: Peer) -> None:
        """Limit the time of a new connection, and close the oldest stranger if there are too many."""
        self._peers.add(peer)
        self._limit(peer)
        strangers = [each for each in self._due if not each.is_admitted]
        if len(strangers) > self._strangers:
            self.close(strangers[0])

    def receive(self, peer: Peer, data: bytes) -> None:
        """Handle the messages that have arrived; close the connection on failure."""
        try:
            *messages, rest = (peer.received + data).split(self._end)
            if len(max(messages, key=len, default=b"")) > self._longest or len(rest) > self._longest + len(self._end):
                raise ContentError(f"a message has more than {self._longest} bytes")
            peer.received = rest
            for message in messages:
                if not peer.is_closed:
                    self._handle(peer, message)
            if peer.is_admitted and not peer.is_closed:  # it may be idle, but not leave a message incomplete
                if messages or not peer.received:
                    self._end_limit(peer)
                if peer.received and peer not in self._due:
                    self._limit(peer)
        except Exception as error:  # one faulty peer must not stop the others
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True  # warn once: a peer that reconnects must not fill the log
            text = str(error) if isinstance(error, ContentError) else f"{type(error).__name__}: {error}"
            _log.log(level, "%s: closed a connection (%s); further ones are closed silently", self._name, text[:200])
            self.close(peer)

    def _limit(self, peer: Peer) -> None:
        self._due[peer] = self._loop.call_later(self._seconds, self.close, peer)

    def _end_limit(self, peer: Peer) -> None:
        if peer in self._due:
            self._due.pop(peer).cancel()


def keep_alive(connection: socket.socket) -> None:
    """Detect an unreachable machine after about half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(*sockets: socket.socket) -> None:
    """Close sockets in forked processes, so that data loader workers do not keep them open after their rank died."""
    _open_sockets.update(sockets)


def _close_all() -> None:
    for each in list(_open_sockets):
        with suppress(OSError):
            os.close(each.detach())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
