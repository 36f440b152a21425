"""What a server does for each request of its workers, and who waits for whom meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from trainwright.checkpoint.write.save import Content
from trainwright.core.run.peers import EndNotice
from trainwright.core.text.bounded import ContentError
from trainwright.strategies.averaging.compression.codecs import Codec
from trainwright.strategies.parameter_server.messages import wire
from trainwright.strategies.parameter_server.messages.packing import pack, unpack
from trainwright.strategies.parameter_server.messages.requests import BYTES, Operation, Status, StepRequest, parse
from trainwright.strategies.parameter_server.messages.sparse_rows import look_up, unpack_rows
from trainwright.strategies.parameter_server.messages.wire import COMING, HEADER, PART, PAYLOAD, Link, reading, whole
from trainwright.strategies.parameter_server.server.clocks import Clocks, Rules
from trainwright.strategies.parameter_server.server.ending import Ending
from trainwright.strategies.parameter_server.server.rounds import Round
from trainwright.strategies.parameter_server.server.shard import Shard, ShardPlan
from trainwright.strategies.parameter_server.worker.rejoining import LostWorker, Offer

# The worker that offers its state to those that come again, at the first server.
_FIRST = 0


class EndedError(Exception):
    """The server has been closed or has failed."""


class ShardServices:
    """Steps one shard and hands it out, as workers ask in threads of their own.

    Args:
        number: of the server among all.
        plan: what is served.
        rules: how.
        workers: how many there are at the beginning; nothing is stepped until all have come.
        codec: how pushed gradients are written; ``None``: as they are.
        replaces: whether lost workers are started anew, so that meetings wait for them.
    """

    def __init__(
        self, number: int, plan: ShardPlan, rules: Rules, workers: int, codec: Codec | None, replaces: bool
    ) -> None:
        self.shard = Shard(plan, number)
        self.links: list[Link] = []
        """Links to workers; closed ones too, for what went over them."""
        self.largest_spread = 0
        """The most steps that ever lay between the fastest and the slowest worker when one was let go on."""
        self._number, self._plan, self._rules, self._codec = number, plan, rules, codec
        self._clocks = Clocks(rules.bound)
        self._changed = threading.Condition()
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
        self._ended: str | None = None
        self._coming: dict[Link, _Coming] = {}  # gradients of which parts are on their way

    # ---- who is there -----------------------------------------------------------------------------------------------

    def expect(self, worker: int, number: int) -> None:
        """The link of this number is to be a worker's."""
        with self._changed:
            self._incarnations[worker] = number

    def goodbye(self, number: int) -> None:
        """The worker at the other end of a link ends well."""
        with self._changed:
            self._gone.add(number)

    def lose(self, worker: int, number: int, link: Link | None) -> None:
        """The link of this number has ended."""
        with self._changed:
            if self._incarnations.get(worker) == number:  # else it has come again meanwhile
                self._forget(worker, has_left=number in self._gone)
        if link is not None:
            self._coming.pop(link, None)
            link.close()

    def end(self, why: str) -> None:
        """Nothing is served any more; all that wait hear of it."""
        with self._changed:
            self._ended = self._ended or why
            self._changed.notify_all()

    @property
    def is_deserted(self) -> bool:
        """Whether all workers are gone, at least one of them without a goodbye, and none is started anew."""
        with self._changed:
            nobody = self._incarnations and not self._awaited and not self._clocks.workers
            return bool(nobody) and not self._replaces and not self._gone.issuperset(self._incarnations.values())

    def _forget(self, worker: int, has_left: bool) -> None:
        self._awaited.discard(worker)
        self._clocks.leave(worker)
        self._round.leave(worker)
        self._votes.pop(worker, None)
        self._given.pop(worker, None)
        if not has_left:
            self._absent.lose(worker)
        self._advance()

    def _until(self, condition: Callable[[], bool]) -> None:
        while self._ended is None and not condition():
            self._changed.wait()
        if self._ended is not None:
            raise EndedError

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

    def give_state(self, worker: int, link: Link) -> None:
        """Send a worker that comes again the state of the run, once there is one for it.

        Raises:
            LinkError, EndedError: if the worker or the server is gone; the worker hears of it by its other links.
        """
        try:
            with self._changed:
                self._until(lambda: self._has_offer_for(worker))
                offer = self._absent.offer
        except RuntimeError as error:
            self.end(str(error))
            return
        assert offer is not None
        offer.give(link)
        with self._changed:
            self._absent.has_state(worker)

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

    def serve(self, operation: Operation, link: Link, worker: int, request: Tensor) -> None:
        """Do what a worker asks for, and answer.

        Raises:
            ContentError: if the request is malformed.
            LinkError: if the worker is gone.
            EndedError: if the server has been closed or has failed, which the worker has been told.
        """
        if operation not in self._SERVICES:
            raise ContentError(f"a worker that has come asks for {operation.name}")
        try:
            self._SERVICES[operation](self, link, worker, request)
        except (wire.LinkError, ContentError):
            raise
        except Exception as error:  # whatever the user's optimizer raises must reach the workers
            if not isinstance(error, EndedError):
                self.end(f"{type(error).__name__}: {error}")
            self.refuse(link, self._ended)
            raise EndedError from error

    def refuse(self, link: Link, why: str | None) -> None:
        """Answer that nothing is served any more."""
        text = torch.frombuffer(bytearray((why or "it was closed").encode()), dtype=torch.uint8)
        link.send(wire.header(wire.FIXED, operation=Status.ENDED, bytes=text.numel()), HEADER).wait()
        link.send(text, BYTES).wait()

    def _reply(self, link: Link, payload: Tensor | None = None, in_parts: bool = False, /, **fields: float) -> None:
        wanted = self._replaces and self.wants_offer
        sent = [link.send(wire.header(wire.FIXED, operation=Status.OK, wanted=wanted, **fields), HEADER)]
        if payload is not None and in_parts:
            parts = enumerate(self._plan.pulled_parts(self._number))
            sent += [link.send(payload[part.start : part.stop], PART + number) for number, part in parts]
        elif payload is not None:
            sent.append(link.send(payload, PAYLOAD))
        for each in sent:
            each.wait()

    def hello(self, link: Link, worker: int, request: Tensor) -> None:
        """Admit a worker.

        Raises:
            ContentError: if it has another model.
        """
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
            step = parse(self._plan, request)
            if wire.field(request, "parts"):
                gradient = self._receive_rest(link, whole(request, "bytes"), step.late)
            else:
                gradient = self._receive_gradient(link, whole(request, "bytes"))
            notice = EndNotice(whole(request, "notice"), wire.field(request, "notice_age"))
        if notice.number:
            with self._changed:
                self._ending.tell(notice, self._clocks)
        push = self._push_together if self._rules.consistency == "sync" else self._push_alone
        push(link, worker, request, gradient, step)

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

    def _push_together(self, link: Link, worker: int, request: Tensor, gradient: Tensor, step: StepRequest) -> None:
        with self._changed:
            # Only one that came while the others were in the midst of a step waits for its end.
            self._until(lambda: self._round.mean is None)
            mine = self._round
            mine.hold = bool(wire.field(request, "hold"))
            mine.clip_value = wire.field(request, "clip_value")
            mine.add(worker, gradient, step.present, step.hyper)
            self._advance()
            self._until(lambda: mine.made or (mine.hold and mine.mean is not None))
            ending = self._ending_for(worker)
        # Nothing is stepped until this worker has pushed again, so what is sent stays as it is.
        if mine.hold:
            self._reply(link, mine.norms, **ending)
        else:
            self._hand_out(link, request, self.shard.flat, **ending)

    def _commit(self, link: Link, worker: int, request: Tensor) -> None:
        with self._changed:
            mine = self._round
            mine.say(worker, wire.field(request, "coefficient"), wire.field(request, "clip_value"))
            self._advance()
            self._until(lambda: mine.made)
            ending = self._ending_for(worker)
        self._hand_out(link, request, self.shard.flat, **ending)

    def _ending_for(self, worker: int) -> dict[str, float]:
        """What an answer to a step or a meeting says of a notice to end, see :mod:`ending`."""
        heard = self._ending.of(self._clocks.clock(worker)) if worker in self._clocks.workers else None
        if heard is None:
            return {}
        return {"notice": heard.number, "notice_age": heard.age, "steps_left": heard.steps_left}

    def _hand_out(self, link: Link, request: Tensor, parameters: Tensor, **fields: float) -> None:
        """Answer a step with the parameters, as the worker wants them: at once, in parts, or not at all."""
        is_quiet, in_parts = wire.field(request, "quiet"), bool(wire.field(request, "pulls_parts"))
        self._reply(link, None if is_quiet else parameters, in_parts, **fields)

    def _rows(self, link: Link, worker: int, request: Tensor) -> None:
        with reading("a request for rows"):
            wanted = torch.empty(whole(request, "bytes") // 8, dtype=torch.int64)
        link.receive(wanted, PAYLOAD).wait(COMING)
        with self._changed, reading("a request for rows"):
            rows = look_up(wanted, self.shard.split(self.shard.flat))
        self._reply(link, rows)

    def _push_alone(self, link: Link, worker: int, request: Tensor, gradient: Tensor, step: StepRequest) -> None:
        with self._changed:
            self._until(lambda: not self._awaited)
            staleness = self._version - self._seen[worker]
            given = self._given.get(worker)
            if given is not None:
                gradient += self._rules.delay_compensation * gradient * gradient * (self.shard.flat - given)
            factor = 1 / max(1, staleness) if self._rules.scale_by_staleness else 1.0
            self.shard.step(gradient, step.present, step.hyper, factor)
            self._version += 1
            self._clocks.tick(worker)
            self._changed.notify_all()
            self._until(lambda: self._clocks.may_go(worker))
            self.largest_spread = max(self.largest_spread, self._clocks.clock(worker) - self._clocks.slowest)
            parameters, ending = self._handed_out(worker), self._ending_for(worker)
        self._hand_out(link, request, parameters, staleness=staleness, **ending)

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
        links = list(self.links)
        self._reply(link, messages=sum(x.messages for x in links), sent=sum(x.sent_bytes for x in links))

    def _vote(self, link: Link, worker: int, request: Tensor) -> None:
        with self._changed:
            before = self._ballots
            self._votes[worker] = wire.field(request, "vote")
            self._advance()
            self._until(lambda: self._ballots > before)
            outcome = self._outcome
        self._reply(link, vote=outcome)

    _SERVICES: ClassVar[dict[Operation, Callable[[ShardServices, Link, int, Tensor], None]]] = {
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
    works: list[wire.Sending]
