"""Parameter server with one thread per worker, which receives gradients, steps a shard and sends parameters."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

from trainwright.core.processes.machine import with_threads_of_caller
from trainwright.core.text.bounded import ContentError
from trainwright.strategies.contract.groups import wait_for_key
from trainwright.strategies.parameter_server.messages import wire
from trainwright.strategies.parameter_server.messages.requests import Operation, request_size
from trainwright.strategies.parameter_server.messages.wire import HEADER, Device, Link, LinkError
from trainwright.strategies.parameter_server.server.rendezvous import ServerRendezvous
from trainwright.strategies.parameter_server.server.services import EndedError, ShardServices

# Seconds to wait for a worker's thread on close; one blocked on a live worker ends with the process.
_PATIENCE = 5.0
_log = logging.getLogger(__name__)


class Server:
    """Server of one shard.

    Args:
        services: of the shard.
        meeting: where workers announce themselves.
        device: of links.
    """

    def __init__(self, services: ShardServices, meeting: ServerRendezvous, device: Device) -> None:
        self.services, self.shard = services, services.shard
        self._number, self._meeting, self._device = services.number, meeting, device
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    # ---- beginning and end ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start serving, in threads."""
        self._run(self._accept, "accept")

    def close(self, why: str = "its rank has ended") -> None:
        """Stop. Live workers are notified at their next request."""
        self.services.end(why)
        self._closing.set()
        for thread in self._threads:
            thread.join(_PATIENCE)

    def _run(self, target: Callable[[], None], what: str) -> None:
        # A daemon: a hanging worker must not block the exit of this process.
        name = f"parameter server {self._number}: {what}"
        thread = threading.Thread(target=with_threads_of_caller(target), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        store, number = self._meeting.client(), 0
        while True:
            key = f"{self._meeting.prefix}/{self._number}/come/{number}"
            try:
                announcement = wait_for_key(store, key, self._closing.wait)
            except RuntimeError:
                return  # the store is gone: no worker can connect
            if announcement is None:
                return
            try:
                self._greet(announcement, number)
            except ContentError as error:
                _log.warning("Parameter server %d ignores a worker of another run: %s", self._number, error)
            number += 1

    def _greet(self, announcement: str, number: int) -> None:
        worker, wants_state = self._meeting.parse_announcement(announcement, self._meeting.link(self._number, number))
        if wants_state:
            self._run(lambda: self._send_state(worker, number), f"state for worker {worker}")
        else:
            self._run(lambda: self._serve(worker, number), f"worker {worker}")

    # ---- one worker -------------------------------------------------------------------------------------------------

    def _send_state(self, worker: int, number: int) -> None:
        with suppress(LinkError, EndedError):
            link = self._link(number)
            try:
                self.services.give_state(worker, link)
            finally:
                link.close()

    def _serve(self, worker: int, number: int) -> None:
        self.services.expect(worker, number)
        link, has_left = None, False
        try:
            link = self._link(number)
            self._admit(link, worker, number)
            while self._answer(link, worker) != Operation.LEAVE:
                pass
            has_left = True
        except (LinkError, EndedError):
            pass  # the worker or the server is gone; other workers are served or notified
        except ContentError as error:  # a fault of this worker only
            _log.warning("Parameter server %d disconnects worker %d: %s", self._number, worker, error)
            with suppress(LinkError):
                if link is not None:
                    self.services.refuse(link, str(error))
        finally:
            self.services.lose(worker, number, link, has_left)

    def _link(self, number: int) -> Link:
        link = Link(self._meeting.client(), self._meeting.link(self._number, number), True, self._device)
        self.services.links.append(link)
        return link

    def _receive(self, link: Link, patience: timedelta = wire.PATIENCE) -> torch.Tensor:
        size = request_size(self.services.plan, self._number)
        return link.fetch(torch.zeros(size, dtype=torch.float64), HEADER, patience)

    def _admit(self, link: Link, worker: int, number: int) -> None:
        """Authenticate a worker before handling requests.

        Raises:
            ContentError: if it is not of this run, or has another model.
        """
        request = self._receive(link, wire.COMING)
        proof = self._meeting.proof(self._meeting.link(self._number, number))
        if wire.whole(request, "proof") != proof or wire.whole(request, "operation") != Operation.HELLO:
            raise ContentError("it is not of this run")
        self.services.hello(link, worker, request)

    def _answer(self, link: Link, worker: int) -> Operation:
        """Handle one request; returns its operation.

        Raises:
            ContentError: if it is malformed.
        """
        request = self._receive(link)
        with wire.reading("a request"):
            operation = Operation(wire.whole(request, "operation"))
        if operation != Operation.LEAVE:
            self.services.serve(operation, link, worker, request)
        return operation
