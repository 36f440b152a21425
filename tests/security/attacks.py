"""Traffic of unauthenticated clients."""

import json
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from trainwright.core.text.messages import seal

SECONDS = 20.0
"""Within which a server must have closed a connection."""


def hostile(rng: random.Random, end: bytes = b"\n") -> bytes:
    """Bytes that no server takes for a message: random ones, brackets, wrong tokens, too long a line."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.randbytes(rng.randint(1, 3000)) + end
    if kind == 1:
        return rng.choice((b"[", b'{"a":', b'[{"a":[')) * rng.randint(1500, 100_000) + end
    if kind == 2:
        return seal("guessed", {"ask": "hello", "worker": 0}).removesuffix(b"\n") + end
    if kind == 3:
        return b"0" * 64 + b" " + b"[" * 5000 + end
    if kind == 4:
        return json.dumps({"ask": "hello", "token": None, "worker": 10**300}).encode() + end
    if kind == 5:
        return bytes(rng.choice(b' {}[]":,\\0aE-\x00\xff\n\r') for _ in range(rng.randint(1, 300))) + end
    return b"x" * 3_000_000  # and no end


def is_closed_after(address: tuple[str, int], sent: bytes) -> bool:
    """Send bytes over a connection of their own; whether the server has closed it then without an answer."""
    with socket.create_connection(address, timeout=SECONDS) as stranger:
        with suppress(ConnectionError):  # closed before all of it was sent
            stranger.sendall(sent)
        return received(stranger) == b""


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection.

    Raises:
        TimeoutError: if it does not.
    """
    found = bytearray()
    with suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
    return bytes(found)


@contextmanager
def idle(address: tuple[str, int], count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections that send this, and then nothing."""
    connections: list[socket.socket] = []
    try:
        for _ in range(count):
            connections.append(socket.create_connection(address, timeout=SECONDS))
            with suppress(ConnectionError):
                connections[-1].sendall(sent)
        yield connections
    finally:
        for connection in connections:
            connection.close()
