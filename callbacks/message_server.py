"""A thread that serves untrusted connections.

Message length and time are bounded, and an error closes only the connection that caused it.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from trainwright.core.text.bounded import ContentError
from trainwright.core.text.messages import LONGEST

_log = logging.getLogger(__name__)
_READ_BYTES = 1 << 16
# Connections waiting to be accepted; beyond that the kernel makes clients retry after a second.
_BACKLOG = 1024
# Pause after a connection could not be accepted because the process is out of file descriptors.
_PAUSE_SECONDS = 0.05


class Peer:
    """One connection.

    Args:
        connection: accepted, non-blocking.

    Attributes:
        is_admitted: set it to let the connection stay idle.
        is_closed: whether it is closed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.received, self.to_send = bytearray(), bytearray()
        self.is_admitted = self.is_closed = self.is_last = False


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
        self._due: dict[Peer, float] = {}  # deadline of the current message, earliest first
        self._has_warned = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stopping, self._wake = socket.socketpair()
        self._selector.register(self._stopping, selectors.EVENT_READ)
        close_in_children(self._listener, self._stopping, self._wake)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close all connections."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        self._wake.close()

    # ---- for ``handle`` and ``lost`` ------------------------------------------------------------------------------

    def send(self, peer: Peer, message: bytes, last: bool = False) -> None:
        """Send bytes when the peer is ready for them; a closed connection is ignored.

        Args:
            peer: connection.
            message: with its terminator.
            last: close the connection afterwards.
        """
        peer.to_send += message
        peer.is_last = last
        self._guarded(self._flush, peer)

    def close(self, peer: Peer) -> None:
        """Close a connection."""
        if peer.is_closed:
            return
        peer.is_closed = True
        self._due.pop(peer, None)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        self._lost(peer)

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._serve():
                now = time.monotonic()
                for peer in [peer for peer, due in self._due.items() if due <= now]:
                    self.close(peer)
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _serve(self) -> bool:
        due = next(iter(self._due.values()), None)
        for key, events in self._selector.select(None if due is None else max(due - time.monotonic(), 0.0)):
            if key.fileobj is self._stopping:
                return False
            if key.fileobj is self._listener:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                self._guarded(self._flush, key.data)
            if events & selectors.EVENT_READ:
                self._guarded(self._receive, key.data)
        return True

    def _guarded(self, act: Callable[[Peer], None], peer: Peer) -> None:
        """Act on an open connection; close it on failure."""
        if peer.is_closed:
            return
        try:
            act(peer)
        except BlockingIOError:
            pass
        except OSError:  # the connection is gone
            self.close(peer)
        except Exception as error:  # one faulty peer must not stop the others
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True  # warn once: a peer that reconnects must not fill the log
            text = str(error) if isinstance(error, ContentError) else f"{type(error).__name__}: {error}"
            _log.log(level, "%s: closed a connection (%s); further ones are closed silently", self._name, text[:200])
            self.close(peer)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # out of file descriptors
            time.sleep(_PAUSE_SECONDS)
            return
        connection.setblocking(False)
        close_in_children(connection)
        peer = Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._due[peer] = time.monotonic() + self._seconds
        strangers = [each for each in self._due if not each.is_admitted]
        if len(strangers) > self._strangers:
            self.close(strangers[0])
        with suppress(OSError):  # already closed
            keep_alive(connection)

    def _receive(self, peer: Peer) -> None:
        received = peer.socket.recv(_READ_BYTES)
        if not received:
            raise ConnectionError
        *messages, rest = (peer.received + received).split(self._end)
        if len(max(messages, key=len, default=b"")) > self._longest or len(rest) > self._longest + len(self._end):
            raise ContentError(f"a message has more than {self._longest} bytes")
        peer.received = rest
        for message in messages:
            if not peer.is_closed:
                self._handle(peer, bytes(message))
        if peer.is_admitted and not peer.is_closed:  # it may be idle, but not leave a message incomplete
            if messages or not peer.received:
                self._due.pop(peer, None)
            if peer.received:
                self._due.setdefault(peer, time.monotonic() + self._seconds)

    def _flush(self, peer: Peer) -> None:
        try:
            sent = peer.socket.send(peer.to_send) if peer.to_send else 0
        except BlockingIOError:
            sent = 0
        del peer.to_send[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.to_send else 0)
        self._selector.modify(peer.socket, events, peer)
        if peer.is_last and not peer.to_send:
            # Closing with unread input would reset the connection and lose the answer.
            peer.socket.shutdown(socket.SHUT_WR)


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
