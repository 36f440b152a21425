"""Killed workers and their replacements, in real processes without Lightning."""

import json
import os
import signal
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.strategies.parameter_server.core import Peer, flat
from trainwright.strategies.parameter_server.messages.wire import Device
from trainwright.strategies.parameter_server.options import ParameterServerOptions
from trainwright.strategies.parameter_server.server import sharder
from trainwright.strategies.parameter_server.server.rendezvous import ServerRendezvous
from trainwright.strategies.parameter_server.server.server import Server
from trainwright.strategies.parameter_server.server.services import ShardServices

WORKERS, STEPS, DIES_AT = 3, 12, 3


def work(worker: int, rules: dict[str, Any], replaces: bool) -> None:
    """Make steps until the clock has reached all of them."""
    store = dist.FileStore("store", -1)
    if replaces:
        store.wait(["come"])
    peer = Peer(worker, WORKERS, store=store, serves=False, least_numel=4, **rules)
    joined = peer.clock
    if replaces:
        peer.client.pull()
        store.set("joined", "1")
    else:
        peer.begin()
    for clock in range(joined, STEPS):
        if worker == 1 and not replaces and clock == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        if worker == 0 and clock == DIES_AT + 3:
            store.set("come", "1")
            store.wait(["joined"])  # joins while there are steps left
        peer.step(clock)
    peer.client.meet()
    store.set(f"result/{worker}", json.dumps({"joined": joined, "parameters": flat(peer.model).tolist()}))
    peer.client.leave()


def fork(worker: int, rules: dict[str, Any], replaces: bool = False) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work(worker, rules, replaces)
        code = 0
    finally:
        os._exit(code)


def serve(rules: dict[str, Any]) -> Any:
    """Serve, after starting the workers, before there are threads."""
    pids = [fork(worker, rules) for worker in range(WORKERS)] + [fork(1, rules, replaces=True)]
    store = dist.FileStore("store", -1)
    with patch.object(sharder, "LEAST_NUMEL", 4):
        plan = Peer.plan_of().in_parts()
    services = ShardServices(0, plan, ParameterServerOptions(**rules), WORKERS)
    server = Server(services, ServerRendezvous(store, "parameter_server"), Device())
    server.start()
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    results = [json.loads(store.get(f"result/{worker}")) for worker in range(WORKERS)] if not any(ends[2:]) else []
    server.close()
    return ends, results, server.services.largest_spread


@pytest.mark.sample(1)
@pytest.mark.parametrize("rules", [
    {"consistency": "sync"}, {"consistency": "ssp", "staleness": 2}, {"consistency": "async"},
], ids=lambda rules: rules["consistency"])  # fmt: skip
def test_a_killed_worker_is_replaced(pool, rules):
    ((ends, results, spread),) = pool.run(serve, 1, rules, init_group=False)
    assert ends == [0, -signal.SIGKILL, 0, 0]
    first = torch.tensor(results[0]["parameters"])
    assert first.isfinite().all()
    for result in results:
        assert torch.equal(torch.tensor(result["parameters"]), first)
    joined = results[1]["joined"]
    assert DIES_AT <= joined < STEPS
    if rules["consistency"] == "sync":
        assert joined == DIES_AT + 3
    assert spread <= rules.get("staleness", STEPS)
