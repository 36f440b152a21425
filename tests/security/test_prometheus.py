"""Strangers at the Prometheus endpoint of a rank."""

import random
import socket
import urllib.request
from typing import Any

import pytest

from tests.callbacks.modules import QUIET, Regression, loader
from tests.security.attacks import hostile, idle, is_closed_after, received
from trainwright import Trainer
from trainwright.callbacks.monitor.prometheus import Prometheus

pytest.importorskip("prometheus_client")


class Attacked(Prometheus):
    """Is attacked when training ends, and asked for its figures after that."""

    text = ""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.port is not None
        rng, address = random.Random(3), ("127.0.0.1", self.port)
        self.on_record(trainer, {"kind": "step", "step": 7, "seconds": {"forward": 1.5}})
        with idle(address, 100), idle(address, 50, b"GET /metrics HTTP/1.1\r\nHost: "):
            for _ in range(150):
                assert is_closed_after(address, hostile(rng, b"\r\n\r\n"))
        with socket.create_connection(address, timeout=20) as odd:
            odd.sendall(b"HEAD /metrics?name[]=%ff&" + b"&" * 2000 + b" HTTP/1.1\r\nAccept: \xff;;q=x\r\n:\r\n\r\n")
            received(odd)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=20) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            self.text = answer.read().decode()


def test_301_attacks_after_which_the_figures_are_served_still() -> None:
    """301 attempts: 151 hostile requests, 150 connections that send nothing or half a request."""
    attacked = Attacked(port=0)
    Trainer(max_steps=1, devices=1, callbacks=[attacked], **QUIET).fit(Regression(), loader())
    assert 'trainwright_step_seconds_forward{rank="0"} 1.5' in attacked.text.splitlines()
