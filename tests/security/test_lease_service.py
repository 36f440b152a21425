"""Strangers at the sample-lease service."""

import random
import socket

import pytest

from tests.security.attacks import hostile, idle, is_closed_after
from trainwright.core.text.messages import seal
from trainwright.trainer.leases.service import LeaseDesk, LeaseError, LeaseService


def test_300_attacks_end_neither_the_service_nor_the_worker_that_it_has() -> None:
    """300 attempts: 150 connections that send something hostile, 150 that send nothing or half a line."""
    rng = random.Random(1)
    service = LeaseService(2)
    address = service.address[:2]
    try:
        desk = LeaseDesk(service.address, 0)
        desk.open(0, 800, 4, 0)
        with idle(address, 100), idle(address, 50, b"0123 {"):
            for number in range(150):
                assert is_closed_after(address, hostile(rng))
                lease = desk.lease(0)
                assert lease is not None
                assert lease.number == number
                desk.finish(0, [lease])
            other = LeaseDesk(service.address, 1)
            assert other.lease(0) is not None
        with pytest.raises(LeaseError, match="closed"):
            LeaseDesk(service.address._replace(token="guessed"), 1)
        desk.close()
        other.close()
    finally:
        service.stop()


def test_100_senseless_requests_of_a_worker_close_its_connection_alone() -> None:
    """100 attempts with the token of the run."""
    rng = random.Random(2)
    service = LeaseService(2)
    token = service.address.token
    senseless = (None, [], {}, -1, 10**400, 1e308, float("inf"), "x", [[]], {"a": []}, True)
    try:
        desk = LeaseDesk(service.address, 0)
        desk.open(0, 4, 4, 0)
        for _ in range(100):
            request = {
                "ask": rng.choice(("open", "done", "back", "end", "hello", "nonsense", None, [])),
                **{name: rng.choice(senseless) for name in ("samples", "chunk", "before", "age", "worker")},
                "epoch": 0,
                "number": None,
                "numbers": rng.choice((None, 5, ["x"], [99], [[]])),
            }
            hello = seal(token, {"ask": "hello", "worker": 1})
            with socket.create_connection(service.address[:2], timeout=20) as worker:
                worker.sendall(hello + seal(token, request) + seal(token, {"ask": "unknown"}))
                while worker.recv(1 << 16):
                    pass
        assert desk.lease(0) is not None
        desk.close()
    finally:
        service.stop()
