"""A parameter server: threads, one per worker, that take gradients, step a shard and hand out parameters."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.write.save import Content
from trainwright.core.run.peers import EndNotice
from trainwright.core.text.bounded import ContentError
from trainwright.core.text.messages import proof_of, run_token, seal, unseal
from trainwright.strategies.averaging.compression.codecs import Codec
from trainwright.strategies.contract.groups import wait_for_key
from trainwright.strategies.parameter_server.messages.packing import pack, unpack
from trainwright.strategies.parameter_server.messages.sparse_rows import look_up, unpack_rows
from trainwright.strategies.parameter_server.messages.wire import (
    COMING,
    FIXED,
    HEADER,
    PART,
    PAYLOAD,
    Device,
    Link,
    LinkError,
    Sending,
    field,
    header,
    reading,
    whole,
)
from trainwright.strategies.parameter_server.server.clocks import Clocks, Consistency, bound_of
from trainwright.strategies.parameter_server.server.ending import Ending
from trainwright.strategies.parameter_server.server.rounds import Round
from trainwright.strategies.parameter_server.server.shard import Shard, ShardPlan
from trainwright.strategies.parameter_server.worker.rejoining import LostWorker, Offer

# Seconds that closing waits for a worker's thread; one that waits for a message of a living worker ends with that.
_PATIENCE = 5.0
# A payload of a size that the header says.
BYTES = 2
# What a request says of each slice.
HAS_GRADIENT, IS_LATE = 1, 2
# The worker that offers its state to those that come again, at the first server.
_FIRST = 0
_log = logging.getLogger(__name__)
_Service = Callable[["Server", Link, int, Tensor], None]


class Operation(IntEnum):
    """What a worker asks for."""

    HELLO = 0
    PUSH = 1
    COMMIT = 2
    PULL = 3
    MEET = 4
    STATE = 5
    LOAD = 6
    VOTE = 7
    LEAVE = 8
    ROWS = 9
    PARTS = 10
    OFFER = 11
    TRAFFIC = 12


class Status(IntEnum):
    """What a server answers."""

    OK = 0
    ENDED = 1


@dataclass(frozen=True)
class Rules:
    """How servers treat what workers push.

    Args:
        consistency: ``"sync"``, ``"ssp"`` or ``"async"``.
        staleness: steps that a worker may be ahead of the slowest, with ``"ssp"``.
        delay_compensation: lambda of DC-ASGD (arXiv:1609.08326, section 3, with constant lambda): a gradient g that was
            computed at parameters v becomes ``g + lambda * g * g * (w - v)`` where they are w by now; 0: off.
        scale_by_staleness: divide learning rates by the steps that others made since the worker pulled
            (arXiv:1511.05950, section 3).
    """

    consistency: Consistency
    staleness: int | None = None
    delay_compensation: float = 0.0
    scale_by_staleness: bool = False


@dataclass(frozen=True)
class ServerMeeting:
    """Where servers and workers of one run find each other.

    Args:
        store: of the run; each thread takes a client of its own.
        prefix: of the keys, never used before.
    """

    store: dist.Store
    prefix: str

    def client(self) -> dist.Store:
        """A connection of its own: a wait on a shared one holds up all others."""
        store: Any = self.store  # its stubs lack clone
        client: dist.Store = store.clone()
        return client

    def come(self, server: int, worker: int, wants_state: bool = False) -> str:
        """Tell a server that a worker comes; the name of the link to be.

        Args:
            server: number of the server.
            worker: number of the worker.
            wants_state: it comes to the first server, for the state of the run.
        """
        store = self.client()
        number = store.add(f"{self.prefix}/{server}/count", 1) - 1
        link = self.link(server, number)
        told = seal(run_token(), {"link": link, "worker": worker, "state": wants_state})
        store.set(f"{self.prefix}/{server}/come/{number}", told.decode())
        return link

    def who_comes(self, told: str, link: str) -> tuple[int, bool]:
        """The worker of a link that is to be, and whether it comes for the state of the run.

        Raises:
            ContentError: if no worker of this run has said so.
        """
        with reading("the announcement of a worker"):
            message = unseal(run_token(), told.encode())
            if message["link"] != link:
                raise ContentError(f"it is of the link {message['link']!r}, where {link!r} is to come")
            return int(message["worker"]), bool(message["state"])

    @staticmethod
    def proof(link: str) -> int:
        """What a worker says first over a link, by which the server knows that it is one of this run."""
        return proof_of(run_token(), link)

    def link(self, server: int, number: int) -> str:
        """Name of the link of the so-manieth to come."""
        return f"{self.prefix}/{server}/link/{number}"


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
        self.shard = Shard(plan, number)
        self.largest_spread = 0
        """The most steps that ever lay between the fastest and the slowest worker when one was let go on."""
        self._number, self._plan, self._rules, self._codec = number, plan, rules, codec
        self._meeting, self._device = meeting, device
        self._clocks = Clocks(bound_of(rules.consistency, rules.staleness))
        self._changed, self._closing = threading.Condition(), threading.Event()
        self._awaited = set(range(workers))
        self._incarnations: dict[int, int] = {}
        self._gone: set[int] = set()  # numbers of links whose workers have said goodbye
        self._round = Round()
        self._votes: dict[int, float] = {}
        self._ballots, self._outcome = 0, 0.0
        self._version = 0
        self._seen: dict[int, int] = {}  # version that a worker has pulled
        self._given: dict[int, Tensor] = {}  # parameters that it has pulled, for delay compensation
        self._meetings, self._met, self._returns = 0, torch.zeros(0), 0
        self._ending = Ending()
        self._absent, self._replaces = LostWorker(replaces), replaces
        self._links: list[Link] = []  # closed ones too, for what went over them
        self._ended: str | None = None
        self._threads: list[threading.Thread] = []
        self._coming: dict[Link, _Coming] = {}  # gradients of which parts are on their way

    # ---- beginning and end ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve, in threads."""
        self._run(self._accept, "accept")

    def close(self, why: str = "its rank has ended") -> None:
        """End. Workers that still live are told at their next request."""
        with self._changed:
            self._ended = self._ended or why
            self._changed.notify_all()
        self._closing.set()
        for thread in self._threads:
            thread.join(_PATIENCE)

    @property
    def is_deserted(self) -> bool:
        """Whether all workers are gone, at least one of them without a goodbye, and none is started anew."""
        with self._changed:
            nobody = self._incarnations and not self._awaited and not self._clocks.workers
            return bool(nobody) and not self._replaces and not self._gone.issuperset(self._incarnations.values())

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

    def _serve(self, worker: int, number: int) -> None:
        with self._changed:
            self._incarnations[worker] = number
        link = None
        try:
            link = self._link(number)
            self._admit(link, worker, number)
            while self._answer(link, worker, number):
                pass
        except LinkError:
            pass  # it is gone: the others go on
        except ContentError as error:  # a fault of this worker: the others go on
            _log.warning("Parameter server %d hangs up on worker %d: %s", self._number, worker, error)
            self._tell_refused(link, str(error))
        finally:
            with self._changed:
                self._drop(worker, number)
            if link is not None:
                self._coming.pop(link, None)
                link.close()

    def _link(self, number: int) -> Link:
        link = Link(self._meeting.client(), self._meeting.link(self._number, number), True, self._device)
        self._links.append(link)
        return link

    def _admit(self, link: Link, worker: int, number: int) -> None:
        """Hear who is at the other end before anything else of it counts.

        Raises:
            ContentError: if it is no worker of this run, or has another model.
        """
        request = torch.zeros(request_size(self._plan, self._number), dtype=torch.float64)
        link.receive(request, HEADER).wait(COMING)
        proof = self._meeting.proof(self._meeting.link(self._number, number))
        if whole(request, "proof") != proof or whole(request, "operation") != Operation.HELLO:
            raise ContentError("it is not of this run")
        self._hello(link, worker, request)

    def _answer(self, link: Link, worker: int, number: int) -> bool:
        """Serve one request; whether another may come.

        Raises:
            ContentError: if it is malformed.
        """
        request = torch.zeros(request_size(self._plan, self._number), dtype=torch.float64)
        link.receive(request, HEADER).wait()
        with reading("a request"):
            operation = Operation(whole(request, "operation"))
        if operation == Operation.LEAVE:
            with self._changed:
                self._gone.add(number)
            return False
        try:
            self._service(operation)(self, link, worker, request)
        except (LinkError, ContentError):
            raise
        except _EndedError:
            self._refuse(link, self._ended)
            return False
        except Exception as error:  # whatever the user's optimizer raises must reach the workers
            with self._changed:
                self._ended = f"{type(error).__name__}: {error}"
                self._changed.notify_all()
            self._refuse(link, self._ended)
            return False
        return True

    def _service(self, operation: Operation) -> _Service:
        if operation not in self._SERVICES:
            raise ContentError(f"a worker that has come asks for {operation.name}")
        return self._SERVICES[operation]

    def _tell_refused(self, link: Link | None, why: str) -> None:
        with suppress(LinkError):
            if link is not None:
                self._refuse(link, why)

    def _refuse(self, link: Link, why: str | None) -> None:
        text = torch.frombuffer(bytearray((why or "it was closed").encode()), dtype=torch.uint8)
        link.send(header(FIXED, operation=Status.ENDED, bytes=text.numel()), HEADER).wait()
        link.send(text, BYTES).wait()

    def _reply(self, link: Link, payload: Tensor | None = None, in_parts: bool = False, /, **fields: float) -> None:
        wanted = self._replaces and self.wants_offer
        sent = [link.send(header(FIXED, operation=Status.OK, wanted=wanted, **fields), HEADER)]
        if payload is not None and in_parts:
            parts = enumerate(self._plan.pulled_parts(self._number))
            sent += [link.send(payload[part.start : part.stop], PART + number) for number, part in parts]
        elif payload is not None:
            sent.append(link.send(payload, PAYLOAD))
        for each in sent:
            each.wait()

    def _drop(self, worker: int, number: int) -> None:
        if self._incarnations.get(worker) != number:
            return  # it has come again meanwhile
        self._awaited.discard(worker)
        self._clocks.leave(worker)
        self._round.leave(worker)
        self._votes.pop(worker, None)
        self._given.pop(worker, None)
        if number not in self._gone:
            self._absent.lose(worker)
        self._advance()

    def _until(self, condition: Callable[[], bool]) -> None:
        while self._ended is None and not condition():
            self._changed.wait()
        if self._ended is not None:
            raise _EndedError

    def _advance(self) -> None:
        """Do what may be done now that somebody has come, gone, pushed or said something."""
        living = self._clocks.training
        if not self._awaited:
            if self._round.has_all(living):
                self._round.average(self.shard.split)
            if self._round.may_be_made(living):
                self._make(self._round)
            elif self._round.mean is not None and not self._round.workers & set(living):
                self._round = Round()  # all that pushed are gone before they said how to step
            if self._votes and set(living) <= set(self._votes):
                self._outcome, self._votes = max(self._votes.values()), {}
                self._ballots += 1
            if self._clocks.have_met and not self._absent.any_lost:
                self._clocks.go_on()
                self._meetings += 1
                self._met, self._returns = self.shard.flat.clone(), self._absent.returns
                self._absent.offer = None  # whoever goes on from before would meet where nobody is any more
        self._changed.notify_all()

    def _make(self, made: Round) -> None:
        assert made.hyper is not None
        self.shard.step(made.clipped, made.present, made.hyper)
        made.made = True
        for worker in made.workers & set(self._clocks.workers):
            self._clocks.tick(worker)
        self._version += 1
        self._round = Round()

    # ---- workers that come again ------------------------------------------------------------------------------------

    @property
    def wants_offer(self) -> bool:
        """Whether a worker is lost, or has come again without a state yet, or nothing is offered since ranks met."""
        return self._absent.wanted or self._absent.offer is None

    def offer(self, content: Content, step: int) -> None:
        """Keep a copy of the state of the run for workers that come again; on the first rank, where a step begins.

        Args:
            content: complete, see ``complete`` of ``strategy.run_state``.
            step: optimizer steps done.
        """
        with self._changed:
            clock = self._clocks.clock(_FIRST)
        self._keep(Offer.of(clock, content, step))

    def _keep(self, offer: Offer) -> None:
        with self._changed:
            self._absent.offer = offer
            self._changed.notify_all()

    def _give_state(self, worker: int, number: int) -> None:
        link = None
        try:
            link = self._link(number)
            with self._changed:
                self._until(lambda: self._has_offer_for(worker))
                offer = self._absent.offer
            assert offer is not None
            offer.give(link)
            with self._changed:
                self._absent.has_state(worker)
        except (LinkError, _EndedError):
            pass  # the worker hears of it by its other links
        except RuntimeError as error:
            with self._changed:
                self._ended = str(error)
                self._changed.notify_all()
        finally:
            if link is not None:
                link.close()

    def _has_offer_for(self, worker: int) -> bool:
        """Whether there is an offer of the clock that a worker starts at, or of the last step before a meeting.

        Raises:
            RuntimeError: if the first rank waits in a meeting that follows another one without a step between them.
        """
        offer, waits = self._absent.offer, _FIRST not in self._clocks.training
        if worker not in self._clocks.workers:
            return False
        if offer is None and waits:
            raise RuntimeError(
                f"worker {worker} was lost where all ranks meet, so there is no state that it could go on from"
            )
        return offer is not None and (waits or offer.clock >= self._clocks.clock(worker))

    # ---- services ---------------------------------------------------------------------------------------------------

    def _hello(self, link: Link, worker: int, request: Tensor) -> None:
        if whole(request, "digest") != self._plan.digest:
            raise ContentError(
                f"worker {worker} has another model or optimizer than the server: names, shapes, types and groups of "
                "parameters have to be the same on all ranks"
            )
        with self._changed:
            self._round.leave(worker)  # what an earlier incarnation pushed, whose end nobody has noticed
            self._votes.pop(worker, None)
            clock = self._clocks.join(worker)
            self._seen[worker] = self._version
            self._awaited.discard(worker)
            self._absent.come(worker)
            self._advance()
        self._reply(link, clock=clock)

    def _push(self, link: Link, worker: int, request: Tensor) -> None:
        with reading("a push"):
            hyper, present, late = parse(self._plan, request)
            if field(request, "parts"):
                gradient = self._receive_rest(link, whole(request, "bytes"), late)
            else:
                gradient = self._receive_gradient(link, whole(request, "bytes"))
            notice = EndNotice(whole(request, "notice"), field(request, "notice_age"))
        if notice.number:
            with self._changed:
                self._ending.tell(notice, self._clocks)
        if self._rules.consistency == "sync":
            self._push_together(link, worker, request, gradient, hyper, present)
        else:
            self._push_alone(link, worker, request, gradient, hyper, present)

    def _receive_gradient(self, link: Link, sparse_bytes: int) -> Tensor:
        if sparse_bytes:
            message = torch.empty(sparse_bytes, dtype=torch.uint8)
            link.receive(message, PAYLOAD).wait(COMING)
            return unpack_rows(message, self.shard.slices, self.shard.flat.dtype)
        numel = self.shard.flat.numel()
        if self._codec is None:
            gradient = torch.empty_like(self.shard.flat)
            link.receive(gradient, PAYLOAD).wait(COMING)
            return gradient
        data = torch.empty(self._codec.row_bytes(numel), dtype=torch.uint8)
        link.receive(data, PAYLOAD).wait(COMING)
        return self._codec.decode(data[None], numel)[0]

    def _parts(self, link: Link, worker: int, request: Tensor) -> None:
        """Gradients are about to come in parts, while the worker computes others; it gets no answer."""
        self._wait_for_parts(link)  # of a step that was not made
        gradient, parts = torch.zeros_like(self.shard.flat), self._plan.parts_of(self._number)
        works = [
            link.receive(gradient[part.start : part.stop], PART + number)
            for number, part in enumerate(parts)
            if part.is_early
        ]
        self._coming[link] = _Coming(gradient, works)

    def _wait_for_parts(self, link: Link) -> Tensor | None:
        coming = self._coming.pop(link, None)
        if coming is None:
            return None
        for each in coming.works:
            each.wait(COMING)
        return coming.gradient

    def _receive_rest(self, link: Link, late_bytes: int, late: Sequence[int]) -> Tensor:
        """A gradient whose parts have been coming, and those of its slices that were not among them or have changed."""
        message = torch.empty(late_bytes, dtype=torch.uint8)
        coming = link.receive(message, PAYLOAD)
        gradient = self._wait_for_parts(link)
        if gradient is None:
            raise ValueError("a worker ended a push in parts that it had not begun")
        coming.wait(COMING)
        if late:
            pieces, targets = [self.shard.slices[each] for each in late], self.shard.split(gradient)
            values = unpack_rows(message, pieces, gradient.dtype).split([piece.numel for piece in pieces])
            for each, value in zip(late, values, strict=True):
                targets[each].copy_(value.view(targets[each].shape))
        return gradient

    def _push_together(
        self, link: Link, worker: int, request: Tensor, gradient: Tensor, hyper: Tensor, present: list[bool]
    ) -> None:
        with self._changed:
            # Only one that came while the others were in the midst of a step waits for its end.
            self._until(lambda: self._round.mean is None)
            mine = self._round
            mine.hold = bool(field(request, "hold"))
            mine.clip_value = field(request, "clip_value")
            mine.add(worker, gradient, present, hyper)
            self._advance()
            self._until(lambda: mine.made or (mine.hold and mine.mean is not None))
            ending = self._ending_for(worker)
        # Nothing is stepped until this worker has pushed again, so what is sent stays as it is.
        if mine.hold:
            self._reply(link, mine.norms, **ending)
        else:
            self._reply(link, self._parameters_for(request), bool(field(request, "pulls_parts")), **ending)

    def _commit(self, link: Link, worker: int, request: Tensor) -> None:
        with self._changed:
            mine = self._round
            mine.say(worker, field(request, "coefficient"), field(request, "clip_value"))
            self._advance()
            self._until(lambda: mine.made)
            ending = self._ending_for(worker)
        self._reply(link, self._parameters_for(request), bool(field(request, "pulls_parts")), **ending)

    def _ending_for(self, worker: int) -> dict[str, float]:
        """What an answer to a step or a meeting says of a notice to end, see :mod:`ending`."""
        heard = self._ending.of(self._clocks.clock(worker)) if worker in self._clocks.workers else None
        if heard is None:
            return {}
        return {"notice": heard.number, "notice_age": heard.age, "steps_left": heard.steps_left}

    def _parameters_for(self, request: Tensor) -> Tensor | None:
        return None if field(request, "quiet") else self.shard.flat

    def _rows(self, link: Link, worker: int, request: Tensor) -> None:
        with reading("a request for rows"):
            wanted = torch.empty(whole(request, "bytes") // 8, dtype=torch.int64)
        link.receive(wanted, PAYLOAD).wait(COMING)
        with self._changed, reading("a request for rows"):
            rows = look_up(wanted, self.shard.split(self.shard.flat))
        self._reply(link, rows)

    def _push_alone(
        self, link: Link, worker: int, request: Tensor, gradient: Tensor, hyper: Tensor, present: list[bool]
    ) -> None:
        with self._changed:
            self._until(lambda: not self._awaited)
            staleness = self._version - self._seen[worker]
            given = self._given.get(worker)
            if given is not None:
                gradient += self._rules.delay_compensation * gradient * gradient * (self.shard.flat - given)
            factor = 1 / max(1, staleness) if self._rules.scale_by_staleness else 1.0
            self.shard.step(gradient, present, hyper, factor)
            self._version += 1
            self._clocks.tick(worker)
            self._changed.notify_all()
            self._until(lambda: self._clocks.may_go(worker))
            self.largest_spread = max(self.largest_spread, self._clocks.clock(worker) - self._clocks.slowest)
            parameters, ending = self._handed_out(worker), self._ending_for(worker)
        self._reply(link, parameters, bool(field(request, "pulls_parts")), staleness=staleness, **ending)

    def _handed_out(self, worker: int) -> Tensor:
        """A copy of the parameters, which others may step while it is sent."""
        self._seen[worker] = self._version
        parameters = self.shard.flat.clone()
        if self._rules.delay_compensation:
            self._given[worker] = parameters
        return parameters

    def _pull(self, link: Link, worker: int, request: Tensor) -> None:
        with self._changed:
            parameters = self._handed_out(worker)
        self._reply(link, parameters)

    def _meet(self, link: Link, worker: int, request: Tensor) -> None:
        with self._changed:
            before = self._meetings
            self._clocks.wait(worker)
            self._advance()
            self._until(lambda: self._meetings > before)
            self._seen[worker] = self._version
            if self._rules.delay_compensation:
                self._given[worker] = self._met
            parameters, clock, returns = self._met, self._clocks.clock(worker), self._returns
            ending = self._ending_for(worker)
        self._reply(link, parameters, clock=clock, returns=returns, **ending)

    def _state(self, link: Link, worker: int, request: Tensor) -> None:
        with self._changed:
            data, text = pack(self.shard.state())
        self._reply(link, bytes=data.numel(), text=text)
        link.send(data, BYTES).wait()

    def _load(self, link: Link, worker: int, request: Tensor) -> None:
        flat = torch.empty_like(self.shard.flat)
        with reading("a state"):
            data = torch.empty(whole(request, "bytes"), dtype=torch.uint8)
        for each in (link.receive(flat, PAYLOAD), link.receive(data, BYTES)):
            each.wait(COMING)
        states = unpack(data, whole(request, "text"))
        if len(states) != len(self.shard.slices):
            raise ContentError(f"{len(states)} states were sent for {len(self.shard.slices)} slices")
        with self._changed:
            self.shard.fill(flat)
            self.shard.load(states)
        self._reply(link)

    def _offer(self, link: Link, worker: int, request: Tensor) -> None:
        with self._changed:
            clock = self._clocks.clock(worker)
        self._keep(Offer.receive(clock, link))
        self._reply(link)

    def _traffic(self, link: Link, worker: int, request: Tensor) -> None:
        links = list(self._links)
        self._reply(link, messages=sum(x.messages for x in links), sent=sum(x.sent_bytes for x in links))

    def _vote(self, link: Link, worker: int, request: Tensor) -> None:
        with self._changed:
            before = self._ballots
            self._votes[worker] = field(request, "vote")
            self._advance()
            self._until(lambda: self._ballots > before)
            outcome = self._outcome
        self._reply(link, vote=outcome)

    _SERVICES: ClassVar[dict[Operation, _Service]] = {
        Operation.PUSH: _push,
        Operation.COMMIT: _commit,
        Operation.PULL: _pull,
        Operation.MEET: _meet,
        Operation.STATE: _state,
        Operation.LOAD: _load,
        Operation.VOTE: _vote,
        Operation.ROWS: _rows,
        Operation.PARTS: _parts,
        Operation.OFFER: _offer,
        Operation.TRAFFIC: _traffic,
    }


class _Coming(NamedTuple):
    """A gradient, into which parts are received."""

    gradient: Tensor
    works: list[Sending]


class _EndedError(Exception):
    """The server has been closed or has failed."""


def request_size(plan: ShardPlan, server: int) -> int:
    """Numbers of a request's header: fixed fields, hyper-parameters, and for each slice whether it has a gradient.

    Where parts have been sent before, also whether the slice is sent with the request.
    """
    return FIXED + plan.hyper.size + len(plan.held[server])


def parse(plan: ShardPlan, request: Tensor) -> tuple[Tensor, list[bool], list[int]]:
    """Hyper-parameters, presence of gradients, and numbers of the slices that are sent with a request."""
    end = FIXED + plan.hyper.size
    slices = [int(each) for each in request[end:].tolist()]
    late = [number for number, each in enumerate(slices) if each & IS_LATE]
    return request[FIXED:end], [bool(each & HAS_GRADIENT) for each in slices], late
