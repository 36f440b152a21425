"""The service of leases, a thread, and its client.

Each worker has one connection, over which it sends lines of JSON, sealed with the token of the service. A lost
connection is a dead worker, unless it has said goodbye. If a worker must wait for others (for returned chunks, or for
all to ask for the state), its answer is delayed: there is no polling and no collective of ranks, so a dead worker
blocks no one.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from trainwright.callbacks.message_server import MessageServer, Peer, close_in_children, keep_alive
from trainwright.core.text.bounded import ContentError
from trainwright.core.text.messages import seal, unseal
from trainwright.trainer.leases.book import Guarantee, Lease, LeaseBook

_LONGEST_ANSWER = 1 << 30  # bytes; the used positions of an epoch may be many
_IN_EPOCH = ("lease", "done", "back", "wait", "state")  # requests
_STRANGERS = 64  # connections allowed besides those of workers
_PEER_SECONDS = 60.0  # to connect
Message = dict[str, Any]


class Address(NamedTuple):
    """Address and secret of a service.

    Args:
        host: name or address.
        port: TCP port.
        token: secret of the run.
    """

    host: str
    port: int
    token: str


class LeaseError(RuntimeError):
    """The service of leases is unavailable, or refused a request."""


class LeaseService:
    """Keeps the book of the present epoch for all workers, in its own thread.

    Args:
        workers: number of workers.
        guarantee: for chunks of dead workers, see :mod:`trainwright.trainer.leases.book`.
        most: maximum samples of the whole run; ``None``: no limit.
        host: address to listen on; by default only this machine can connect.
        token: secret of the workers; empty = a new one.

    Attributes:
        address: for workers to connect.
    """

    def __init__(
        self,
        workers: int,
        guarantee: Guarantee = "at_least_once",
        most: int | None = None,
        host: str = "127.0.0.1",
        token: str = "",
    ) -> None:
        self._workers, self._guarantee, self._most = workers, guarantee, most
        self._epoch = -1
        self._book = LeaseBook(0, 1, guarantee)
        self._plan: Message = {}
        self._before = 0  # samples done in earlier epochs
        self._ending: tuple[int, float] | None = None  # number and time of a stop notice
        self._living: dict[int, Peer] = {}
        self._workers_of: dict[Peer, int] = {}
        self._waiting: dict[Peer, str] = {}  # request whose answer is delayed
        self._gone: set[int] = set()
        self._server = MessageServer(
            self._handle, self._lose, name="trainwright-leases", host=host, strangers=workers + _STRANGERS
        )
        self.address = Address(host, self._server.port, token or secrets.token_hex(16))
        self._server.start()

    def stop(self) -> None:
        """End the thread and close all connections."""
        self._server.stop()

    # ---- in the thread of the server --------------------------------------------------------------------------------

    def _answer(self, peer: Peer, message: Message) -> None:
        self._waiting.pop(peer, None)
        if self._ending is not None:
            message = {**message, "end": [self._ending[0], time.monotonic() - self._ending[1]]}
        self._server.send(peer, seal(self.address.token, message))

    def _lose(self, peer: Peer) -> None:
        self._waiting.pop(peer, None)
        worker = self._workers_of.pop(peer, None)
        if worker is not None and self._living.get(worker) is peer:
            self._remove(worker, dead=True)

    def _remove(self, worker: int, dead: bool) -> None:
        del self._living[worker]
        self._gone.add(worker)
        self._book.leave(worker, dead)
        self._answer_waiting()

    # ---- requests -------------------------------------------------------------------------------------------------

    def _handle(self, peer: Peer, line: bytes) -> None:
        message: Message = unseal(self.address.token, line)
        name, worker = message["ask"], self._workers_of.get(peer)
        if worker is None:
            self._admit(peer, message)
        elif name == "end":
            self._ending = self._ending or (int(message["number"]), time.monotonic() - float(message["age"]))
            self._answer_waiting()
        elif name == "bye":
            del self._workers_of[peer]
            self._waiting.pop(peer, None)
            self._remove(worker, dead=False)
        elif name == "open":
            self._open(peer, message)
        elif name not in _IN_EPOCH:
            raise ContentError(f"unexpected request {name!r} of a connected worker")
        elif message.get("epoch") != self._epoch:
            if name in ("lease", "wait", "state"):
                self._answer(peer, {"error": f"epoch {message.get('epoch')} is over, epoch {self._epoch} has started"})
        elif name == "lease":
            lease = self._book.lease(worker) if self._ending is None else None
            self._answer(peer, {"lease": None if lease is None else list(lease), "done": self._done})
        elif name == "done":
            self._book.finish(worker, map(int, message["numbers"]))
            self._answer_waiting()
        elif name == "back":
            self._book.give_back(worker, map(int, message["numbers"]))
            self._answer_waiting()
        else:
            self._waiting[peer] = name
            self._answer_waiting()

    def _admit(self, peer: Peer, message: Message) -> None:
        worker = int(message["worker"])
        if message["ask"] != "hello" or not 0 <= worker < self._workers:
            raise ContentError(f"the first request must be the hello of a worker below {self._workers}")
        if worker in self._living:  # restarted before the loss of its old connection was noticed
            self._server.close(self._living[worker])
        peer.is_admitted = True
        self._workers_of[peer] = worker
        self._living[worker] = peer
        self._gone.discard(worker)
        self._answer(peer, {"done": self._done})

    def _open(self, peer: Peer, message: Message) -> None:
        """Start an epoch, unless it has started."""
        plan = {name: int(message[name]) for name in ("epoch", "samples", "chunk")}
        if plan["epoch"] == self._epoch and self._plan != plan:
            differ = [name for name in plan if plan[name] != self._plan[name]]
            values = "; ".join(f"{name} {plan[name]} here, {self._plan[name]} elsewhere" for name in differ)
            self._answer(peer, {"error": f"workers disagree about the epoch that they lease: {values}"})
            return
        if plan["epoch"] < self._epoch:
            self._answer(peer, {"error": f"epoch {plan['epoch']} is over, epoch {self._epoch} has started"})
            return
        if plan["epoch"] != self._epoch:
            self._before = int(message["before"]) if self._epoch < 0 else self._done
            self._epoch, self._plan = plan["epoch"], plan
            limit = None if self._most is None else max(self._most - self._before, 0)
            self._book = LeaseBook(plan["samples"], plan["chunk"], self._guarantee, limit)
        self._answer(peer, {"done": self._done})

    @property
    def _done(self) -> int:
        """Samples of the run that are done."""
        return self._before + self._book.done_samples

    def _answer_waiting(self) -> None:
        """Answer waiting workers, if possible."""
        for peer in self._peers_waiting_for("wait"):
            if self._book.has_more and self._ending is None:
                self._answer(peer, {"more": True, "done": self._done, "spent": False})
            elif self._book.is_settled or (self._ending is not None and self._all_ask("wait")):
                is_spent = self._most is not None and self._done >= self._most
                answer = {"more": False, "done": self._done, "spent": is_spent}
                if not self._book.is_settled:
                    answer["ended"] = True
                for each in self._peers_waiting_for("wait"):
                    self._answer(each, answer)
                break
        if self._all_ask("state"):
            state = {
                "used": self._book.used(),
                "lost": self._book.lost_samples,
                "complete": self._book.is_complete,
                "done": self._done,
            }
            for peer in self._peers_waiting_for("state"):
                self._answer(peer, state)

    def _peers_waiting_for(self, name: str) -> list[Peer]:
        """Return those that wait for the answer to a request."""
        return [peer for peer, request in self._waiting.items() if request == name]

    def _all_ask(self, name: str) -> bool:
        """Return whether all living workers, and at least one, wait for the answer to a request."""
        asking = len(self._peers_waiting_for(name))
        return bool(asking) and asking == len(self._living) >= self._workers - len(self._gone)


class LeaseDesk:
    """A worker's client of the service, for use by one thread.

    Args:
        address: of the service.
        worker: number of this worker.

    Attributes:
        heard: number and age in seconds of a stop notice given to any worker, as of the last answer; nothing is leased
            afterwards.

    Raises:
        LeaseError: (here and in all methods) if the service is unavailable or refuses.
    """

    def __init__(self, address: Address, worker: int) -> None:
        self.worker = worker
        self.done_samples = 0  # of the run, by all workers, as far as known here
        self.heard: tuple[int, float] | None = None
        try:
            self._socket = socket.create_connection(address[:2], timeout=_PEER_SECONDS)
        except OSError as error:
            raise LeaseError(_unreachable(error)) from error
        self._socket.settimeout(None)  # answers may wait for the slowest worker
        keep_alive(self._socket)
        close_in_children(self._socket)
        self._lines = self._socket.makefile("rb")
        self._token = address.token
        self._ask("hello", worker=worker)

    def open(self, epoch: int, samples: int, chunk: int, before: int) -> None:
        """Start to lease an epoch, with equal arguments on every worker.

        Args:
            epoch: the epoch.
            samples: number of its remaining samples.
            chunk: samples per chunk.
            before: samples that the run had trained on before it started to lease; ignored in later epochs.
        """
        self._ask("open", epoch=epoch, samples=samples, chunk=chunk, before=before)

    def lease(self, epoch: int) -> Lease | None:
        """Return the next chunk; ``None``: there is none now. Never waits for another worker."""
        found = self._ask("lease", epoch=epoch)["lease"]
        return None if found is None else Lease(*found)

    def finish(self, epoch: int, leases: Sequence[Lease]) -> None:
        """Report that these chunks are done."""
        self._send("done", epoch=epoch, numbers=[lease.number for lease in leases])
        self.done_samples += sum(lease.samples for lease in leases)  # included in later answers

    def give_back(self, epoch: int, leases: Sequence[Lease]) -> None:
        """Return chunks that are not trained on here."""
        self._send("back", epoch=epoch, numbers=[lease.number for lease in leases])

    def wait_for_more(self, epoch: int) -> Message:
        """Wait until a chunk is available, or none will be in this epoch. Called by a worker that holds none.

        Returns:
            ``more``: whether one is available; ``spent``: whether the run has trained on its maximum of samples;
            ``ended``, if present: all workers wait here within the epoch after a stop notice.
        """
        return self._ask("wait", epoch=epoch)

    def state(self, epoch: int) -> Message:
        """Return the position in the epoch, equal on all living workers, all of which must ask.

        Returns:
            ``used`` (positions that must not be read again), ``lost`` and ``done`` (samples), ``complete``.
        """
        return self._ask("state", epoch=epoch)

    def send_end_notice(self, number: int, age: float) -> None:
        """Send a stop notice, see :attr:`heard`; the first one counts."""
        self._send("end", number=number, age=age)

    def close(self) -> None:
        """Disconnect; chunks held by this worker go to others."""
        with suppress(LeaseError):
            self._send("bye")
        self._lines.close()
        self._socket.close()

    def _send(self, name: str, **content: Any) -> None:
        try:
            self._socket.sendall(seal(self._token, {"ask": name, **content}))
        except OSError as error:
            raise LeaseError(_unreachable(error)) from error

    def _ask(self, name: str, **content: Any) -> Message:
        self._send(name, **content)
        try:
            line = self._lines.readline(_LONGEST_ANSWER)
        except OSError as error:
            raise LeaseError(_unreachable(error)) from error
        if not line.endswith(b"\n"):
            raise LeaseError(_unreachable("the connection was closed"))
        answer: Message = unseal(self._token, line, _LONGEST_ANSWER)
        if "error" in answer:
            raise LeaseError(f"{answer['error']}.")
        self.done_samples = answer["done"]
        number, age = answer.get("end", (0, 0.0))
        self.heard = (number, age) if number else None
        return answer


def _unreachable(why: object) -> str:
    return (
        f"The process that leases samples to the workers is unavailable ({why}). It runs on the first rank; if that "
        "has failed, its own error says why. Resume the last checkpoint with ckpt_path=last."
    )


def listening_host(environment: Mapping[str, str]) -> str:
    """Return the address that a service of a run listens on: local if all ranks are on this machine, else MASTER_ADDR.

    Args:
        environment: variables of torch elastic.
    """
    everywhere, here = environment.get("WORLD_SIZE", "1"), environment.get("LOCAL_WORLD_SIZE", "1")
    return "127.0.0.1" if everywhere == here else environment.get("MASTER_ADDR", "127.0.0.1")
