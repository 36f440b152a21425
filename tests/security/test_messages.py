"""Messages of strangers are authenticated first, and bounded in length, nesting and time."""

import json
import logging
import random
import socket

import pytest
import torch

from tests.security.attacks import hostile, idle, is_closed_after, received
from trainwright.callbacks.message_server import MessageServer, Peer
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.memory.replicas import pack, unpack
from trainwright.checkpoint.write.save import Content
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import DEPTH, ContentError, parse_json
from trainwright.core.text.messages import LONGEST, seal, unseal


def test_a_sealed_message_is_read_with_its_token_alone() -> None:
    message = {"ask": "hello", "deep": [[["]}", "\\"]]], "number": 1.5, "text": "ä\n["}
    line = seal("secret", message)
    assert unseal("secret", line) == unseal("secret", line[:-1]) == message
    assert b"secret" not in line
    for other in (line[:-2] + b" \n", b"0" + line[1:], line[1:], line.partition(b" ")[2], b"", b" ", seal("", message)):
        with pytest.raises(ContentError, match="token"):
            unseal("secret", other)


def test_1000_hostile_messages_are_refused_before_they_are_parsed() -> None:
    """1,000 attempts without the token, and 1,000 that are nested too deep."""
    rng = random.Random(17)
    for _ in range(1000):
        sent = hostile(rng)
        with pytest.raises(ContentError):
            unseal("secret", sent)
        with pytest.raises(ContentError):
            parse_json(rng.choice((b"[", b'{"":', b'["]",')) * rng.randint(DEPTH + 1, 5000), LONGEST)
    with pytest.raises(ContentError, match="at most 10 B"):
        unseal("secret", seal("secret", "12345678901"), longest=10)
    with pytest.raises(ContentError, match="not JSON"):
        parse_json(b"9" * 5000)
    assert parse_json(b'["' + b"[" * 5000 + b'\\"["]') == ["[" * 5000 + '"[']
    assert parse_json(json.dumps(nested := [[[[]]]]).encode()) == nested


@pytest.fixture
def echo():
    """Echo server; admits a peer that sends "stay", fails at "fail"."""
    lost: list[Peer] = []

    def handle(peer: Peer, message: bytes) -> None:
        if message == b"fail":
            raise RecursionError
        if message == b"stay":
            peer.is_admitted = True
        server.send(peer, message + b"\n", last=message == b"bye")

    server = MessageServer(handle, lost.append, name="echo", longest=100, seconds=1.0, strangers=8)
    server.lost = lost  # type: ignore[attr-defined]
    server.start()
    yield server
    server.stop()


def test_messages_have_a_length_and_a_deadline_and_admitted_peers_may_be_idle(echo, caplog):
    address = ("127.0.0.1", echo.port)
    with caplog.at_level(logging.WARNING), socket.create_connection(address, timeout=20) as admitted:
        admitted.sendall(b"stay\n")  # before the others come, which are one stranger too many with it
        assert admitted.recv(100) == b"stay\n"
        with idle(address, 4) as silent, idle(address, 4, b"half") as slow:
            for each in (*silent, *slow):
                assert received(each) == b""
        for sent in (b"x" * 101 + b"\n", b"x" * 5000, b"fail\n"):
            assert is_closed_after(address, sent)
        admitted.sendall(b"x" * 100 + b"\nstill")
        assert admitted.recv(200) == b"x" * 100 + b"\n"
        assert received(admitted) == b""  # it began a message and did not end it
    with socket.create_connection(address, timeout=20) as polite:
        polite.sendall(b"bye\n")
        assert received(polite) == b"bye\n"
    assert len([each for each in caplog.records if "closed a connection" in each.message]) == 1


def test_idle_strangers_block_no_other_peer(echo: MessageServer) -> None:
    """200 idle connections."""
    address = ("127.0.0.1", echo.port)
    with idle(address, 200):
        for _ in range(10):
            with socket.create_connection(address, timeout=20) as polite:
                polite.sendall(b"hello\n")
                assert polite.recv(100) == b"hello\n"
        assert len(echo.lost) >= 192 - 8  # type: ignore[attr-defined]


def test_500_damaged_states_of_another_rank_are_refused() -> None:
    """500 attempts: bytes of the header turned, cut or nested; each is refused, or is a state still."""
    rng, refused = random.Random(10), 0
    box = torch.arange(6.0)
    content = Content({"epoch": 3}, {"weight": TensorParts((6,), torch.float32, [((0,), box)])}, {})
    header, block = pack(content, 7), box.view(torch.uint8)
    assert torch.equal(unpack(header, block).content.tensors["weight"].parts[0][1], box)
    for _ in range(500):
        octets = bytearray(header.numpy().tobytes())
        for _ in range(rng.randint(1, 3)):
            octets[rng.randrange(len(octets))] = rng.randrange(256)
        if rng.random() < 0.3:
            octets = rng.choice((bytearray(b"[" * rng.randint(1500, 9000)), octets[: rng.randint(1, len(octets))]))
        try:
            unpack(torch.frombuffer(octets, dtype=torch.uint8), block[: rng.choice((24, 24, 20))])
        except CheckpointError:
            refused += 1
    assert refused > 300
