"""Strangers and malformed workers at a parameter server."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.security.attacks import hostile
from tests.strategies.parameter_server.core import PREFIX, Peer
from trainwright.core.text.bounded import ContentError
from trainwright.core.text.messages import RUN_TOKEN, seal
from trainwright.launch.ranks.rendezvous import LocalStore
from trainwright.strategies.parameter_server.dedicated_ranks import FitSignals
from trainwright.strategies.parameter_server.messages.packing import pack, unpack
from trainwright.strategies.parameter_server.messages.requests import BYTES, Operation, Status, request_size
from trainwright.strategies.parameter_server.messages.wire import (
    FIXED,
    HEADER,
    PAYLOAD,
    Device,
    Link,
    LinkError,
    field,
    header,
)
from trainwright.strategies.parameter_server.options import ParameterServerOptions
from trainwright.strategies.parameter_server.server.rendezvous import ServerRendezvous
from trainwright.strategies.parameter_server.server.server import Server
from trainwright.strategies.parameter_server.server.services import ShardServices

Payload = tuple[torch.Tensor, int]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(RUN_TOKEN, "of this run")
    with LocalStore() as own:
        yield own.store


class Stranger:
    """Comes to server 0 as worker 1 does, and sends what it likes."""

    def __init__(self, store: dist.Store, device: Device, plan: Any) -> None:
        self._device, self._plan = device, plan
        self._meeting = ServerRendezvous(store, PREFIX)

    def come(self, payloads: Sequence[Payload] = (), of_run: bool = True, **fields: float) -> str:
        """Send a header and payloads over a link of its own, after a hello if it is of the run; the server's answer."""
        name = self._meeting.announce(0, 1)
        link = Link(self._meeting.client(), name, False, self._device)
        if of_run:
            hello = {"operation": Operation.HELLO, "digest": self._plan.digest, "proof": self._meeting.proof(name)}
            link.send(self._header(**hello), HEADER).wait()
            assert self._reply(link) == Status.OK
        sent = [link.send(self._header(**fields), HEADER)]
        sent += [link.send(payload, tag) for payload, tag in payloads]
        assert self._reply(link) == Status.ENDED
        text = torch.empty(int(field(self._last, "bytes")), dtype=torch.uint8)
        link.receive(text, BYTES).wait()
        for each in sent:
            with suppress(LinkError):
                each.wait()
        return bytes(text.numpy()).decode()

    def _header(self, **fields: float) -> torch.Tensor:
        return header(request_size(self._plan, 0), **fields)

    def _reply(self, link: Link) -> int:
        self._last = torch.zeros(FIXED, dtype=torch.float64)
        link.receive(self._last, HEADER).wait()
        return int(field(self._last, "operation"))


def test_128_attacks_after_which_the_server_makes_the_steps_of_its_worker(store: Any) -> None:
    """100 announcements and 4 links of strangers, 24 malformed requests of a worker of the run."""
    rng, plan, device = random.Random(4), Peer.plan_of(), Device()
    services = ShardServices(0, plan, ParameterServerOptions(consistency="async"), 1)
    server = Server(services, ServerRendezvous(store, PREFIX), device)
    server.start()
    try:
        for _ in range(100):
            number = store.add(f"{PREFIX}/0/count", 1) - 1
            garbage = rng.choice(("", "0", "worker", "state 0", "\x00", seal("guessed", {}).decode()))
            told = garbage if rng.random() < 0.5 else hostile(rng)[:5000]
            store.set(f"{PREFIX}/0/come/{number}", told)
        worker = Peer(0, 1, store=store, serves=False)
        worker.begin()
        stranger = Stranger(store, device, plan)
        for number, proof in enumerate((0.0, -1.0, float("nan"), 5.0)):
            operation = (Operation.HELLO, Operation.LOAD, 99)[number % 3]
            said = stranger.come(of_run=False, operation=operation, digest=plan.digest, proof=proof)
            assert "not of this run" in said or "proof=" in said
            worker.step(number)
        for number, (fields, payloads) in enumerate(requests := list(_senseless(rng, plan))):
            worker.step(number)
            said = stranger.come(payloads, **fields)
            assert said, fields
        assert len(requests) == 24
        worker.end()
    finally:
        server.close()


def _senseless(rng: random.Random, plan: Any) -> Iterator[tuple[dict[str, float], list[Payload]]]:
    """Fields of a header, and what follows it."""
    sizes = (float("nan"), -1.0, 2.0**52)
    for operation in (*sizes, 99, Operation.HELLO):
        yield {"operation": operation}, []
    for operation in (Operation.PUSH, Operation.ROWS, Operation.LOAD):
        for size in sizes:
            yield {"operation": operation, "bytes": size}, [(torch.zeros(plan.numel(0)), PAYLOAD)]
    for _ in range(4):
        garbage = torch.frombuffer(bytearray(rng.randbytes(8 * rng.randint(1, 9))), dtype=torch.uint8)
        for operation in (Operation.PUSH, Operation.ROWS):
            yield {"operation": operation, "bytes": len(garbage)}, [(garbage, PAYLOAD)]
    yield {"operation": Operation.PUSH, "parts": 1, "bytes": 8}, [(torch.zeros(8, dtype=torch.uint8), PAYLOAD)]
    lengths = torch.tensor([float("nan"), 2.0**60], dtype=torch.float64)
    yield {"operation": Operation.OFFER}, [(lengths, HEADER)]


def test_500_damaged_states_of_optimizers_are_refused() -> None:
    """500 attempts: bytes turned, cut or nested; none ends in anything but a refusal or a state."""
    rng = random.Random(5)
    data, text = pack([{"step": torch.tensor(3.0), "exp_avg": torch.ones(4, 5), "name": "x"}])
    assert unpack(data, text)[0]["name"] == "x"
    refused = 0
    for _ in range(500):
        octets = bytearray(data.numpy().tobytes())
        for _ in range(rng.randint(1, 4)):
            octets[rng.randrange(text)] = rng.randrange(256)
        if rng.random() < 0.2:
            octets = bytearray(b"[" * rng.randint(1500, 9000))
        try:
            unpack(
                torch.frombuffer(octets[: rng.randint(1, len(octets))], dtype=torch.uint8), rng.choice((text, 10**6))
            )
        except ContentError:
            refused += 1
    assert refused > 450


def test_only_the_first_worker_ends_a_fit(store: Any) -> None:
    """20 attempts to end a server's fit with a message that is not of the run."""
    rng = random.Random(6)
    of_server, of_worker = FitSignals(store, 1), FitSignals(store, 0)
    ended: list[object] = []

    def wait() -> None:
        try:
            of_server.wait_for_end()
        except SystemExit as end:
            ended.append(end.code)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    for _ in range(20):
        told = {"fit": of_server.prefix, "problem": "", "code": 1}
        store.set(f"{of_server.prefix}/end", rng.choice((hostile(rng)[:5000], seal("guessed", told))))
        waiting.join(0.05)
        assert waiting.is_alive()
    while store.check([f"{of_server.prefix}/end"]):
        waiting.join(0.05)
    of_worker.end(code=7)
    waiting.join(20)
    assert ended == [7]
