"""Connections that are cut while some of them are being closed."""

import os
import socket
from collections.abc import Iterator

import pytest

from trainwright.callbacks.inject import network
from trainwright.callbacks.inject.network import Endpoint, cut_off


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the two ends of a connection within this process."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            yield near, far


def of(pair: tuple[socket.socket, socket.socket]) -> dict[int, tuple[str, str]]:
    """Return the connection of this pair only; this process has others, to the ranks of the pool."""
    numbers = [end.fileno() for end in pair]
    return {number: ends for number, ends in network.connections(os.getpid()).items() if number in numbers}


def own() -> Endpoint:
    return Endpoint("", os.getpid(), ())


def test_both_ends_are_shut_down(pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    known = of(pair)
    monkeypatch.setattr(network, "connections", lambda _: known)
    assert cut_off(own(), [own()]) == 2
    assert pair[0].recv(1) == pair[1].recv(1) == b""


@pytest.mark.parametrize("now", ["nothing", "a file", "another connection"])
def test_closed_meanwhile(now, pair, tmp_path, monkeypatch):
    known = of(pair)
    descriptor = os.dup(pair[0].fileno())
    known[descriptor] = ("0100007F:0001", "0100007F:0001")  # formerly a connection to port 1
    monkeypatch.setattr(network, "connections", lambda _: known)
    before = len(os.listdir("/proc/self/fd"))
    if now == "nothing":
        os.close(descriptor)
        before -= 1
    if now == "a file":
        with (tmp_path / "file").open("w") as file:
            os.dup2(file.fileno(), descriptor)
    assert cut_off(own(), [Endpoint("", 1, ())]) == 2
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"
    if now != "nothing":
        os.close(descriptor)
