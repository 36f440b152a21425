"""A parameter server: threads, one per worker, that take gradients, step a shard and hand out parameters."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

from trainwright.core.text.bounded import ContentError
from trainwright.strategies.averaging.compression.codecs import Codec
from trainwright.strategies.contract.groups import wait_for_key
from trainwright.strategies.parameter_server.messages import wire
from trainwright.strategies.parameter_server.messages.requests import Operation, request_size
from trainwright.strategies.parameter_server.messages.wire import Device, Link, LinkError
from trainwright.strategies.parameter_server.server.meeting import ServerMeeting
from trainwright.strategies.parameter_server.server.services import EndedError, Rules, ShardServices
from trainwright.strategies.parameter_server.server.shard import ShardPlan

# Seconds that closing waits for a worker's thread; one that waits for a message of a living worker ends with that.
_PATIENCE = 5.0
_log = logging.getLogger(__name__)


class Server:
    """Serves one shard.

    Args:
        number: of the server among all.
        plan: what is served.
        rules: how.
        meeting: where workers announce themselves.
        workers: how many there are at the beginning; nothing is stepped until all have come.
        device: to make links over.
        codec: how pushed gradients are written; ``None``: as they are.
        replaces: whether lost workers are started anew, so that meetings wait for them.
    """

    def __init__(
        self,
        number: int,
        plan: ShardPlan,
        rules: Rules,
        meeting: ServerMeeting,
        workers: int,
        device: Device,
        codec: Codec | None = None,
        replaces: bool = False,
    ) -> None:
        self.services = ShardServices(number, plan, rules, workers, codec, replaces)
        self.shard = self.services.shard
        self._number, self._plan, self._meeting, self._device = number, plan, meeting, device
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    # ---- beginning and end ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve, in threads."""
        self._run(self._accept, "accept")

    def close(self, why: str = "its rank has ended") -> None:
        """End. Workers that still live are told at their next request."""
        self.services.end(why)
        self._closing.set()
        for thread in self._threads:
            thread.join(_PATIENCE)

    def _run(self, target: Callable[[], None], what: str) -> None:
        # A daemon: a worker that hangs must not keep this process from ending.
        thread = threading.Thread(target=target, name=f"parameter server {self._number}: {what}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        store, number = self._meeting.client(), 0
        while True:
            key = f"{self._meeting.prefix}/{self._number}/come/{number}"
            try:
                told = wait_for_key(store, key, self._closing.wait)
            except RuntimeError:
                return  # the store is gone: nobody can come any more
            if told is None:
                return
            try:
                self._greet(told, number)
            except ContentError as error:
                _log.warning("Parameter server %d takes no worker that is not of this run: %s", self._number, error)
            number += 1

    def _greet(self, told: str, number: int) -> None:
        worker, wants_state = self._meeting.who_comes(told, self._meeting.link(self._number, number))
        if wants_state:
            self._run(lambda: self._give_state(worker, number), f"state for worker {worker}")
        else:
            self._run(lambda: self._serve(worker, number), f"worker {worker}")

    # ---- one worker -------------------------------------------------------------------------------------------------

    def _give_state(self, worker: int, number: int) -> None:
        with suppress(LinkError, EndedError):
            link = self._link(number)
            try:
                self.services.give_state(worker, link)
            finally:
                link.close()

    def _serve(self, worker: int, number: int) -> None:
        self.services.expect(worker, number)
        link = None
        try:
            link = self._link(number)
            self._admit(link, worker, number)
            while self._answer(link, worker) != Operation.LEAVE:
                pass
            self.services.goodbye(number)
        except (LinkError, EndedError):
            pass  # the worker or the server is gone: the others go on, or have been told
        except ContentError as error:  # a fault of this worker: the others go on
            _log.warning("Parameter server %d hangs up on worker %d: %s", self._number, worker, error)
            with suppress(LinkError):
                if link is not None:
                    self.services.refuse(link, str(error))
        finally:
            self.services.lose(worker, number, link)

    def _link(self, number: int) -> Link:
        link = Link(self._meeting.client(), self._meeting.link(self._number, number), True, self._device)
        self.services.links.append(link)
        return link

    def _receive(self, link: Link, patience: timedelta = wire.PATIENCE) -> torch.Tensor:
        request = torch.zeros(request_size(self._plan, self._number), dtype=torch.float64)
        link.receive(request, wire.HEADER).wait(patience)
        return request

    def _admit(self, link: Link, worker: int, number: int) -> None:
        """Hear who is at the other end before anything else of it counts.

        Raises:
            ContentError: if it is no worker of this run, or has another model.
        """
        request = self._receive(link, wire.COMING)
        proof = self._meeting.proof(self._meeting.link(self._number, number))
        if wire.whole(request, "proof") != proof or wire.whole(request, "operation") != Operation.HELLO:
            raise ContentError("it is not of this run")
        self.services.hello(link, worker, request)

    def _answer(self, link: Link, worker: int) -> Operation:
        """Serve one request; what it was.

        Raises:
            ContentError: if it is malformed.
        """
        request = self._receive(link)
        with wire.reading("a request"):
            operation = Operation(wire.whole(request, "operation"))
        if operation != Operation.LEAVE:
            self.services.serve(operation, link, worker, request)
        return operation
