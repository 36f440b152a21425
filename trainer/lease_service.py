"""One thread that keeps the book of leases, and what workers ask it with.

Each worker has one connection to it, over which go lines of JSON; nothing that arrives can run code. A connection that
is lost is a worker that died, unless it said goodbye. Where a worker has to wait for others (for chunks that may come
back, or for all to ask for the state), its answer waits: nobody polls, and no collective of the ranks is needed, so
that a dead worker keeps nobody.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainwright.trainer.lease_book import Guarantee, Lease, LeaseBook

_LONGEST = 1 << 20  # bytes of a request
_PEER_SECONDS = 60.0  # for a connection to be made
Message = dict[str, Any]


class Address(NamedTuple):
    """Where a service listens, and the word that a worker has to know.

    Args:
        host: name or address.
        port: TCP port.
        token: secret of the run.
    """

    host: str
    port: int
    token: str


class LeaseError(RuntimeError):
    """The service of leases cannot be had any more, or refused a request."""


@dataclass
class _Peer:
    """A connection."""

    socket: socket.socket
    worker: int | None = None
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    waits: str | None = None  # the request to which the answer waits


class LeaseService:
    """Keeps the book of the present epoch for all workers, in a thread of its own.

    Args:
        workers: number of workers.
        guarantee: what becomes of chunks of the dead, see :mod:`trainwright.trainer.lease_book`.
        most: samples after which the whole run is over; ``None``: no limit.
        host: address to listen at; by default this machine alone can connect.

    Attributes:
        address: what workers need to connect.
    """

    def __init__(
        self, workers: int, guarantee: Guarantee = "at_least_once", most: int | None = None, host: str = "127.0.0.1"
    ) -> None:
        LeaseBook(0, 1, guarantee)  # refuses what is impossible
        self._workers, self._guarantee, self._most = workers, guarantee, most
        self._epoch = -1
        self._book = LeaseBook(0, 1, guarantee)
        self._plan: Message = {}
        self._before = 0  # samples done in earlier epochs
        self._ending: tuple[int, float] | None = None  # a notice that the run is to end, and when it was given
        self._living: dict[int, _Peer] = {}
        self._gone: set[int] = set()
        self._listener = socket.create_server((host, 0), backlog=workers + 8)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stopping, self._wake = socket.socketpair()
        self._selector.register(self._stopping, selectors.EVENT_READ)
        _close_in_children(self._listener, self._stopping, self._wake)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._thread = threading.Thread(target=self._run, name="trainwright-leases", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close all connections."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        self._wake.close()

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _serve(self) -> bool:
        for key, events in self._selector.select():
            if key.fileobj is self._stopping:
                return False
            if key.fileobj is self._listener:
                self._accept()
                continue
            peer: _Peer = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    self._flush(peer)
                if events & selectors.EVENT_READ:
                    self._receive(peer)
            except (OSError, ValueError, KeyError, TypeError):  # lost, or no worker of ours
                self._lose(peer)
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        _keep_alive(connection)
        _close_in_children(connection)
        self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))

    def _receive(self, peer: _Peer) -> None:
        try:
            received = peer.socket.recv(1 << 16)
        except BlockingIOError:
            return
        if not received:
            raise ConnectionError
        peer.received += received
        *lines, rest = peer.received.split(b"\n")
        peer.received = bytearray(rest)
        if len(rest) > _LONGEST:
            raise ValueError
        for line in lines:
            self._handle(peer, json.loads(line))

    def _answer(self, peer: _Peer, message: Message) -> None:
        peer.waits = None
        if self._ending is not None:
            message = {**message, "end": [self._ending[0], time.monotonic() - self._ending[1]]}
        peer.to_send += json.dumps(message).encode() + b"\n"
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            sent = peer.socket.send(peer.to_send) if peer.to_send else 0
        except BlockingIOError:
            sent = 0
        del peer.to_send[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.to_send else 0)
        self._selector.modify(peer.socket, events, peer)

    def _lose(self, peer: _Peer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.worker is not None and self._living.get(peer.worker) is peer:
            self._remove(peer.worker, dead=True)

    def _remove(self, worker: int, dead: bool) -> None:
        del self._living[worker]
        self._gone.add(worker)
        if dead:
            self._book.bury(worker)
        else:
            self._book.give_back(worker)
        self._let_go_on()

    # ---- requests -------------------------------------------------------------------------------------------------

    def _handle(self, peer: _Peer, message: Message) -> None:
        name = message["ask"]
        if peer.worker is None:
            self._admit(peer, message)
            return
        if name == "end":
            self._ending = self._ending or (int(message["number"]), time.monotonic() - float(message["age"]))
            self._let_go_on()
        elif name == "bye":
            self._remove(peer.worker, dead=False)
            peer.worker = None
        elif name == "open":
            self._open(peer, message)
        elif message.get("epoch") != self._epoch:
            if name in ("lease", "wait", "state"):
                self._answer(peer, {"error": f"epoch {message.get('epoch')} is over, epoch {self._epoch} has begun"})
        elif name == "lease":
            lease = self._book.lease(peer.worker) if self._ending is None else None
            self._answer(peer, {"lease": None if lease is None else list(lease), "done": self._done})
        elif name == "done":
            self._book.finish(peer.worker, map(int, message["numbers"]))
            self._let_go_on()
        elif name == "back":
            self._book.give_back(peer.worker, map(int, message["numbers"]))
            self._let_go_on()
        elif name in ("wait", "state"):
            peer.waits = name
            self._let_go_on()
        else:
            raise ValueError(name)

    def _admit(self, peer: _Peer, message: Message) -> None:
        if message["ask"] != "hello" or not hmac.compare_digest(str(message["token"]), self.address.token):
            raise ValueError("not of this run")
        worker = int(message["worker"])
        if worker in self._living:  # it has begun anew before the loss of its old connection was seen
            self._lose(self._living[worker])
        peer.worker = worker
        self._living[worker] = peer
        self._gone.discard(worker)
        self._answer(peer, {"done": self._done})

    def _open(self, peer: _Peer, message: Message) -> None:
        """Begin an epoch; who comes later finds it begun."""
        plan = {name: int(message[name]) for name in ("epoch", "samples", "chunk")}
        if plan["epoch"] == self._epoch and self._plan != plan:
            differ = [name for name in plan if plan[name] != self._plan[name]]
            told = "; ".join(f"{name} {plan[name]} here, {self._plan[name]} elsewhere" for name in differ)
            self._answer(peer, {"error": f"workers disagree about the epoch that they lease: {told}"})
            return
        if plan["epoch"] < self._epoch:
            self._answer(peer, {"error": f"epoch {plan['epoch']} is over, epoch {self._epoch} has begun"})
            return
        if plan["epoch"] != self._epoch:
            self._begin(plan, int(message["before"]))
        self._answer(peer, {"done": self._done})

    def _begin(self, plan: Message, before: int) -> None:
        self._before = before if self._epoch < 0 else self._done
        self._epoch, self._plan = plan["epoch"], plan
        limit = None if self._most is None else max(self._most - self._before, 0)
        self._book = LeaseBook(plan["samples"], plan["chunk"], self._guarantee, limit)

    @property
    def _done(self) -> int:
        """Samples of the run that are done."""
        return self._before + self._book.done_samples

    @property
    def _is_spent(self) -> bool:
        return self._most is not None and self._done >= self._most

    def _let_go_on(self) -> None:
        """Answer those that wait, if what they wait for is there."""
        for peer in [peer for peer in self._living.values() if peer.waits == "wait"]:
            if self._book.has_more and self._ending is None:
                self._answer_or_lose(peer, {"more": True, "done": self._done, "spent": False})
            elif self._book.is_settled or (self._ending is not None and self._all_ask("wait")):
                answer = {"more": False, "done": self._done, "spent": self._is_spent}
                if not self._book.is_settled:
                    answer["ended"] = True
                for each in [each for each in self._living.values() if each.waits == "wait"]:
                    self._answer_or_lose(each, answer)
                break
        asking = [peer for peer in self._living.values() if peer.waits == "state"]
        if self._all_ask("state"):
            state = {
                "used": self._book.used(),
                "lost": self._book.lost_samples,
                "complete": self._book.is_complete,
                "done": self._done,
                "before": self._before,
            }
            for peer in asking:
                self._answer_or_lose(peer, state)

    def _all_ask(self, name: str) -> bool:
        """Whether all workers that live, and some do, wait for the answer to this."""
        asking = sum(peer.waits == name for peer in self._living.values())
        return bool(asking) and asking == len(self._living) >= self._workers - len(self._gone)

    def _answer_or_lose(self, peer: _Peer, message: Message) -> None:
        try:
            self._answer(peer, message)
        except OSError:
            self._lose(peer)


class LeaseDesk:
    """A worker's side of the service: one connection, to be used by one thread.

    Args:
        address: of the service.
        worker: number of this worker.

    Raises:
        LeaseError: (here and in all methods) if the service cannot be reached or refuses.
    """

    def __init__(self, address: Address, worker: int) -> None:
        self.worker = worker
        self.done_samples = 0  # of the run, by all workers, as far as it is known here
        self.heard: tuple[int, float] | None = None
        """Number and age in seconds of a notice that a worker was given: the run is to end, nothing is leased any more;
        as of the last answer."""
        try:
            self._socket = socket.create_connection(address[:2], timeout=_PEER_SECONDS)
        except OSError as error:
            raise LeaseError(_unreachable(error)) from error
        self._socket.settimeout(None)  # an answer may wait for the slowest worker
        _keep_alive(self._socket)
        _close_in_children(self._socket)
        self._lines = self._socket.makefile("rb")
        self._ask("hello", token=address.token, worker=worker)

    def open(self, epoch: int, samples: int, chunk: int, before: int) -> None:
        """Begin to lease an epoch, with the same arguments on every worker.

        Args:
            epoch: the epoch.
            samples: samples of it that are left.
            chunk: samples of a chunk.
            before: samples that the run had trained on before it began to lease; later epochs know it.
        """
        self._ask("open", epoch=epoch, samples=samples, chunk=chunk, before=before)

    def lease(self, epoch: int) -> Lease | None:
        """The next chunk; ``None``: there is none now. Never waits for another worker."""
        found = self._ask("lease", epoch=epoch)["lease"]
        return None if found is None else Lease(*found)

    def finish(self, epoch: int, leases: Sequence[Lease]) -> None:
        """Tell that these chunks are done."""
        self._tell("done", epoch=epoch, numbers=[lease.number for lease in leases])
        self.done_samples += sum(lease.samples for lease in leases)  # a later answer counts them too

    def give_back(self, epoch: int, leases: Sequence[Lease]) -> None:
        """Tell that nothing of these chunks was or will be trained on here."""
        self._tell("back", epoch=epoch, numbers=[lease.number for lease in leases])

    def wait_for_more(self, epoch: int) -> Message:
        """Wait until there is a chunk to be had, or until none will come any more in this epoch.

        To be called by a worker that holds none.

        Returns:
            ``more``: which of the two; ``spent``: whether the run has trained on as many samples as it may;
            ``ended``, if it is there: within the epoch, as it was told to, all workers wait here at the same time.
        """
        return self._ask("wait", epoch=epoch)

    def state(self, epoch: int) -> Message:
        """Where the epoch stands, the same on all living workers, all of which have to ask.

        Returns:
            ``used`` (positions that must not be read again), ``lost`` and ``done`` (samples), ``complete``.
        """
        return self._ask("state", epoch=epoch)

    def tell_end(self, number: int, age: float) -> None:
        """Tell that the run is to end, see :attr:`heard`; the first notice counts."""
        self._tell("end", number=number, age=age)

    def close(self) -> None:
        """Say goodbye: what this worker holds goes to others."""
        with suppress(LeaseError):
            self._tell("bye")
        self._lines.close()
        self._socket.close()

    def _tell(self, name: str, **content: Any) -> None:
        try:
            self._socket.sendall(json.dumps({"ask": name, **content}).encode() + b"\n")
        except OSError as error:
            raise LeaseError(_unreachable(error)) from error

    def _ask(self, name: str, **content: Any) -> Message:
        self._tell(name, **content)
        try:
            line = self._lines.readline()
        except OSError as error:
            raise LeaseError(_unreachable(error)) from error
        if not line.endswith(b"\n"):
            raise LeaseError(_unreachable("the connection was closed"))
        answer: Message = json.loads(line)
        if "error" in answer:
            raise LeaseError(f"{answer['error']}.")
        self.done_samples = answer["done"]
        number, age = answer.get("end", (0, 0.0))
        self.heard = (number, age) if number else None
        return answer


def _unreachable(why: object) -> str:
    return (
        f"The process that leases samples to the workers cannot be reached any more ({why}). It runs on the first "
        "rank; if that has failed, its own error says why. Go on from the last checkpoint with ckpt_path=last."
    )


def _keep_alive(connection: socket.socket) -> None:
    """Notice a machine that is gone without a word, after about half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# A worker of a data loader that is forked from a rank would hold the rank's connections open after its death.
_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_children(*sockets: socket.socket) -> None:
    _open_sockets.update(sockets)


def _close_all() -> None:
    for each in list(_open_sockets):
        with suppress(OSError):
            os.close(each.detach())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


def listening_host(environment: Mapping[str, str]) -> str:
    """Where a service of a run listens: on this machine alone if all ranks are here, else where they meet.

    Args:
        environment: variables as torch elastic sets them.
    """
    everywhere, here = environment.get("WORLD_SIZE", "1"), environment.get("LOCAL_WORLD_SIZE", "1")
    return "127.0.0.1" if everywhere == here else environment.get("MASTER_ADDR", "127.0.0.1")
