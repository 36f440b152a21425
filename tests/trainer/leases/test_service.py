import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trainwright.trainer.leases.service import Address, LeaseDesk, LeaseError, LeaseService, listening_host


@contextmanager
def service(*args: Any, **kwargs: Any) -> Iterator[LeaseService]:
    running = LeaseService(*args, **kwargs)
    try:
        yield running
    finally:
        running.stop()


def in_thread(function: Callable[..., Any], *args: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(*args)), daemon=True)
    thread.start()
    return thread, results


def train(address: Address, worker: int, samples: int, die_after: int = 0) -> Any:
    """Lease and finish an epoch at a random speed; return the positions and the last answer."""
    rng = random.Random(worker)
    desk = LeaseDesk(address, worker)
    desk.open(0, samples, 4, 0)
    read: list[int] = []
    while True:
        leases = [lease for lease in (desk.lease(0) for _ in range(rng.randint(1, 3))) if lease is not None]
        if not leases:
            answer = desk.wait_for_more(0)
            if answer["more"]:
                continue
            desk.close()
            return read, answer
        for lease in leases:
            if die_after and len(read) >= die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(rng.random() * 0.002)
            read += range(lease.first, lease.last)
            desk.finish(0, [lease])


class Process:
    """:func:`train` in a child process, forked before the service starts its thread."""

    def __init__(self, worker: int, die_after: int = 0) -> None:
        reading, self._address = os.pipe()
        self._result, writing = os.pipe()
        self._child = os.fork()
        if self._child:
            os.close(reading)
            os.close(writing)
            return
        try:
            os.close(self._address)
            host, port, token, samples = json.loads(os.read(reading, 1000))
            os.write(writing, json.dumps(train(Address(host, port, token), worker, samples, die_after)).encode())
        finally:
            os._exit(0)

    def start(self, address: Address, samples: int) -> None:
        os.write(self._address, json.dumps([*address, samples]).encode())
        os.close(self._address)

    def result(self) -> Any:
        """Return the positions that it read and the last answer, or ``None`` if it died."""
        with os.fdopen(self._result, "rb") as pipe:
            result = pipe.read()
        os.waitpid(self._child, 0)
        return json.loads(result) if result else None


def run(processes: list[Process], samples: int, guarantee: Any = "at_least_once") -> list[Any]:
    with service(len(processes), guarantee) as running:
        for process in processes:
            process.start(running.address, samples)
        return [process.result() for process in processes]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_processes_read_each_sample_once(workers: int) -> None:
    found = run([Process(worker) for worker in range(workers)], 203)
    assert Counter(position for read, _ in found for position in read) == Counter(range(203))
    assert all(answer == {"more": False, "done": 203, "spent": False} for _, answer in found)


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_killed_processes(guarantee: Any) -> None:
    (read, answer), *died = run([Process(0), Process(1, die_after=8), Process(2, die_after=4)], 203, guarantee)
    # A process with too few chunks to die ends normally.
    assert None in died
    lived = [position for each in [(read, answer), *died] if each is not None for position in each[0]]
    # Chunks finished by dead workers are not repeated.
    assert max(Counter(lived).values()) == 1
    if guarantee == "at_least_once":
        assert answer["done"] == 203
    else:  # each died with one to three leases
        assert 203 - 2 * 12 <= answer["done"] < 203


def test_idle_worker_waits_for_reassignment() -> None:
    with service(2) as running:
        slow, idle = LeaseDesk(running.address, 0), LeaseDesk(running.address, 1)
        for desk in (slow, idle):
            desk.open(3, 8, 4, 0)
        leases = [slow.lease(3), slow.lease(3)]
        assert idle.lease(3) is None
        thread, results = in_thread(idle.wait_for_more, 3)
        assert leases[0] is not None
        slow.finish(3, [leases[0]])
        thread.join(0.1)
        assert thread.is_alive()
        anew = LeaseDesk(running.address, 0)  # before the service notices the lost connection
        thread.join(30)
        assert results == [{"more": True, "done": 4, "spent": False}]
        found = idle.lease(3)
        assert found is not None
        assert found == leases[1]
        with pytest.raises(LeaseError, match="ckpt_path=last"):
            slow.lease(3)
        idle.finish(3, [found])
        assert idle.wait_for_more(3) == {"more": False, "done": 8, "spent": False}
        idle.close()
        anew.close()
        slow.close()


def test_state_waits_for_live_workers_only() -> None:
    with service(3, "at_most_once", most=100) as running:
        desks = [LeaseDesk(running.address, worker) for worker in range(3)]
        for desk in desks:
            desk.open(0, 40, 4, 60)
        leases = [desk.lease(0) for desk in desks]
        assert leases[1] is not None
        desks[1].finish(0, [leases[1]])
        asked = [in_thread(desk.state, 0) for desk in desks[:2]]
        asked[0][0].join(0.1)
        assert asked[0][0].is_alive()
        desks[2]._socket.shutdown(socket.SHUT_RDWR)
        for thread, _ in asked:
            thread.join(30)
        state = {"used": [[4, 12]], "lost": 4, "complete": False, "done": 64}
        assert [results for _, results in asked] == [[state], [state]]
        for desk in desks:
            desk.close()


def test_sample_limit_of_a_run() -> None:
    with service(1, most=20) as running:
        desk = LeaseDesk(running.address, 0)
        desk.open(0, 12, 4, 0)
        desk.finish(0, list(iter(lambda: desk.lease(0), None)))
        assert desk.wait_for_more(0) == {"more": False, "done": 12, "spent": False}
        desk.open(1, 12, 4, desk.done_samples)
        leases = list(iter(lambda: desk.lease(1), None))
        assert [lease.number for lease in leases] == [0, 1]
        desk.give_back(1, leases[:1])
        assert desk.lease(1) == leases[0]
        desk.finish(1, leases)
        assert desk.wait_for_more(1) == {"more": False, "done": 20, "spent": True}
        desk.close()


def test_worker_reconnects() -> None:
    with service(1) as running:
        old = LeaseDesk(running.address, 0)
        old.open(0, 8, 4, 0)
        assert old.lease(0) is not None
        new = LeaseDesk(running.address, 0)
        new.open(0, 8, 4, 0)
        assert [lease.number for lease in iter(lambda: new.lease(0), None)] == [0, 1]
        with pytest.raises(LeaseError):
            old.lease(0)
        new.close()
        old.close()


def test_invalid_clients() -> None:
    with service(1) as running:
        with pytest.raises(LeaseError, match="closed"):
            LeaseDesk(running.address._replace(token="guessed"), 0)
        desk = LeaseDesk(running.address, 0)
        desk.open(0, 4, 4, 0)
        with pytest.raises(LeaseError, match="workers disagree .* samples 5 here, 4 elsewhere"):
            desk.open(0, 5, 4, 0)
        with pytest.raises(LeaseError, match="epoch 7 is over"):
            desk.lease(7)
        desk.close()
    with pytest.raises(LeaseError, match="is unavailable"):
        LeaseDesk(running.address, 0)


def test_listening_host() -> None:
    assert listening_host({}) == "127.0.0.1"
    assert listening_host({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node7"}) == "127.0.0.1"
    assert listening_host({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node7"}) == "node7"
