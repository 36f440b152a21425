"""Handling of worker requests, and waiting between workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

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
from trainwright.strategies.parameter_server.options import ParameterServerOptions
from trainwright.strategies.parameter_server.server.clocks import Clocks, EndNoticeBoard
from trainwright.strategies.parameter_server.server.rounds import Round
from trainwright.strategies.parameter_server.server.shard import Shard, ShardPlan
from trainwright.strategies.parameter_server.server.sharder import places
from trainwright.strategies.parameter_server.worker.rejoining import LostWorkers, Offer

# Worker that offers its state to rejoining workers, at the first server.
_FIRST = 0


class EndedError(Exception):
    """Server that was closed or failed."""


class ShardServices:
    """Steps one shard and serves it to workers, each in a thread.

    Args:
        number: index of the server.
        plan: of all shards.
        options: of consistency.
        workers: initial number; no step is made before all are connected.
        codec: of pushed gradients; ``None``: uncompressed.
        replaces: whether lost workers are restarted, so that meetings wait for them.
    """

    def __init__(
        self,
        number: int,
        plan: ShardPlan,
        options: ParameterServerOptions,
        workers: int,
        codec: Codec | None = None,
        replaces: bool = False,
    ) -> None:
        self.shard = Shard(plan, number)
        self.links: list[Link] = []
        """Links to workers; also closed ones, for their traffic."""
        self.largest_spread = 0
        """Largest clock difference between the fastest and the slowest worker when one proceeded."""
        self.number, self.plan, self._options, self._codec = number, plan, options, codec
        self._clocks = Clocks(options.bound)
        self._changed = threading.Condition()
        self._awaited = set(range(workers))
        self._incarnations: dict[int, int] = {}
        self._gone: set[int] = set()  # links of workers that left regularly
        self._round = Round()
        self._votes: dict[int, float] = {}
        self._ballots, self._outcome = 0, 0.0
        self._version = 0
        self._seen: dict[int, int] = {}  # version pulled by each worker
        self._given: dict[int, Tensor] = {}  # parameters pulled by each worker, for delay compensation
        self._meetings, self._met, self._returns = 0, torch.zeros(0), 0
        self._ending = EndNoticeBoard()
        self._absent, self._replaces = LostWorkers(replaces), replaces
        self._ended: str | None = None
        self._coming: dict[Link, tuple[Tensor, list[wire.Sending]]] = {}  # gradients received in parts

    # ---- workers -----------------------------------------------------------------------------------------------------

    def expect(self, worker: int, number: int) -> None:
        """Assign a link to a worker."""
        with self._changed:
            self._incarnations[worker] = number

    def lose(self, worker: int, number: int, link: Link | None, has_left: bool) -> None:
        """Handle the end of a link, regular if its worker has left."""
        with self._changed:
            if has_left:
                self._gone.add(number)
            if self._incarnations.get(worker) == number:  # else it has reconnected
                self._forget(worker, has_left)
        if link is not None:
            self._coming.pop(link, None)
            link.close()

    def end(self, why: str) -> None:
        """Stop serving and wake all that wait."""
        with self._changed:
            self._ended = self._ended or why
            self._changed.notify_all()

    @property
    def is_deserted(self) -> bool:
        """True if all workers are gone, at least one unexpectedly, and none is restarted."""
        with self._changed:
            is_empty = self._incarnations and not self._awaited and not self._clocks.workers
            return bool(is_empty) and not self._replaces and not self._gone.issuperset(self._incarnations.values())

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
        """Make all progress that is possible after a change of workers, pushes, votes or commits."""
        living = self._clocks.training
        if not self._awaited:
            if self._round.has_all(living):
                self._round.average(self.shard.split)
            if self._round.may_be_made(living):
                self._make(self._round)
            elif self._round.mean is not None and not self._round.workers & set(living):
                self._round = Round()  # all that pushed are gone before their commit
            if self._votes and set(living) <= set(self._votes):
                self._outcome, self._votes = max(self._votes.values()), {}
                self._ballots += 1
            if self._clocks.all_waiting and not self._absent.any_lost:
                self._clocks.release()
                self._meetings += 1
                self._met, self._returns = self.shard.flat.clone(), self._absent.returns
                self._absent.offer = None  # a rejoining worker would miss the meeting
        self._changed.notify_all()

    def _make(self, made: Round) -> None:
        assert made.hyper is not None
        self.shard.step(made.clipped, made.present, made.hyper)
        made.made = True
        for worker in made.workers & set(self._clocks.workers):
            self._clocks.tick(worker)
        self._version += 1
        self._round = Round()

    # ---- rejoining workers ------------------------------------------------------------------------------------------

    @property
    def wants_offer(self) -> bool:
        """True if a worker is lost, or has rejoined without a state, or there is no offer since the last meeting."""
        return self._absent.wanted or self._absent.offer is None

    def offer(self, content: Content, step: int) -> None:
        """Keep a copy of the run's state for rejoining workers; on the first rank, at the start of a step.

        Args:
            content: complete, see ``complete`` of ``strategy.run_state``.
            step: optimizer steps done.
        """
        self._keep(_FIRST, Offer.of(content, step))

    def _keep(self, worker: int, offer: Offer) -> None:
        with self._changed:  # the worker makes no step while it offers
            self._absent.offer, self._absent.offered_at = offer, self._clocks.clock(worker)
            self._changed.notify_all()

    def give_state(self, worker: int, link: Link) -> None:
        """Send the run's state to a rejoining worker, once available.

        Raises:
            LinkError, EndedError: if the worker or the server is gone; the worker is notified by its other links.
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
        """Return whether there is an offer for a worker's clock, or for the last step before a meeting.

        Raises:
            RuntimeError: if the first rank is at a meeting right after another one, without a step between them.
        """
        offer, waits = self._absent.offer, _FIRST not in self._clocks.training
        if worker not in self._clocks.workers:
            return False
        if offer is None and waits:
            raise RuntimeError(
                f"worker {worker} was lost at a meeting of all ranks, so there is no state that it could resume from"
            )
        return offer is not None and (waits or self._absent.offered_at >= self._clocks.clock(worker))

    # ---- requests ----------------------------------------------------------------------------------------------------

    def serve(self, operation: Operation, link: Link, worker: int, request: Tensor) -> None:
        """Handle a worker's request.

        Raises:
            ContentError: if the request is malformed.
            LinkError: if the worker is gone.
            EndedError: if the server was closed or failed, of which the worker is notified.
        """
        handle = getattr(self, f"_{operation.name.lower()}", None)
        if handle is None:
            raise ContentError(f"a connected worker asks for {operation.name}")
        try:
            handle(link, worker, request)
        except (wire.LinkError, ContentError):
            raise
        except Exception as error:  # errors of the user's optimizer must reach the workers
            if not isinstance(error, EndedError):
                self.end(f"{type(error).__name__}: {error}")
            self.refuse(link, self._ended)
            raise EndedError from error

    def refuse(self, link: Link, why: str | None) -> None:
        """Reply that the server has ended."""
        text = torch.frombuffer(bytearray((why or "it was closed").encode()), dtype=torch.uint8)
        link.send(wire.header(wire.FIXED, operation=Status.ENDED, bytes=text.numel()), HEADER).wait()
        link.send(text, BYTES).wait()

    def _reply(self, link: Link, payload: Tensor | None = None, in_parts: bool = False, /, **fields: float) -> None:
        wanted = self._replaces and self.wants_offer
        sent = [link.send(wire.header(wire.FIXED, operation=Status.OK, wanted=wanted, **fields), HEADER)]
        if payload is not None and in_parts:
            parts = enumerate(self.plan.pulled_parts(self.number))
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
        if whole(request, "digest") != self.plan.digest:
            raise ContentError(f"worker {worker} has another model or optimizer than the server; build the same one")
        with self._changed:
            self._round.leave(worker)  # push of an earlier incarnation that ended unnoticed
            self._votes.pop(worker, None)
            clock = self._clocks.join(worker)
            self._seen[worker] = self._version
            self._awaited.discard(worker)
            self._absent.come(worker)
            self._advance()
        self._reply(link, clock=clock)

    def _push(self, link: Link, worker: int, request: Tensor) -> None:
        with reading("a push"):
            step = parse(self.plan, request)
            if wire.field(request, "parts"):
                gradient = self._receive_rest(link, whole(request, "bytes"), step.late)
            else:
                gradient = self._receive_gradient(link, whole(request, "bytes"))
            notice = EndNotice(whole(request, "notice"), wire.field(request, "notice_age"))
        if notice.number:
            with self._changed:
                self._ending.tell(notice, self._clocks)
        push = self._push_together if self._options.averages_every_step else self._push_alone
        push(link, worker, request, gradient, step)

    def _receive_gradient(self, link: Link, sparse_bytes: int) -> Tensor:
        if sparse_bytes:
            message = link.fetch(torch.empty(sparse_bytes, dtype=torch.uint8))
            return unpack_rows(message, self.shard.slices, self.shard.flat.dtype)
        if self._codec is None:
            return link.fetch(torch.empty_like(self.shard.flat))
        numel = self.shard.flat.numel()
        data = link.fetch(torch.empty(self._codec.row_bytes(numel), dtype=torch.uint8))
        return self._codec.decode(data[None], numel)[0]

    def _parts(self, link: Link, worker: int, request: Tensor) -> None:
        """Receive gradients in parts, during the worker's backward; no reply."""
        self._wait_for_parts(link)  # of a step that was skipped
        gradient, parts = torch.zeros_like(self.shard.flat), self.plan.parts[self.number]
        works = [
            link.receive(gradient[part.start : part.stop], PART + number)
            for number, part in enumerate(parts)
            if part.is_early
        ]
        self._coming[link] = gradient, works

    def _wait_for_parts(self, link: Link) -> Tensor | None:
        gradient, works = self._coming.pop(link, (None, []))
        for each in works:
            each.wait(COMING)
        return gradient

    def _receive_rest(self, link: Link, late_bytes: int, late: Sequence[int]) -> Tensor:
        """Return a gradient received in parts, completed by slices that were missing or changed since."""
        message = torch.empty(late_bytes, dtype=torch.uint8)
        coming = link.receive(message, PAYLOAD)
        gradient = self._wait_for_parts(link)
        if gradient is None:
            raise ValueError("a worker ended a push in parts that it had not started")
        coming.wait(COMING)
        if late:
            pieces, targets = [self.shard.slices[each] for each in late], self.shard.split(gradient)
            values = unpack_rows(message, pieces, gradient.dtype)
            for each, (piece, value) in zip(late, places(pieces, values), strict=True):
                targets[each].copy_(value.view(piece.shape))
        return gradient

    def _push_together(self, link: Link, worker: int, request: Tensor, gradient: Tensor, step: StepRequest) -> None:
        with self._changed:
            # A worker that joined during the others' step waits for its end.
            self._until(lambda: self._round.mean is None)
            mine = self._round
            mine.hold = bool(wire.field(request, "hold"))
            mine.clip_value = wire.field(request, "clip_value")
            mine.add(worker, gradient, step.present, step.hyper)
            self._advance()
            self._until(lambda: mine.made or (mine.hold and mine.mean is not None))
            ending = self._ending_for(worker)
        # No step is made until this worker pushes again, so the sent memory does not change.
        if mine.hold:
            self._reply(link, mine.norms, **ending)
        else:
            self._hand_out(link, request, self.shard.flat, **ending)

    def _commit(self, link: Link, worker: int, request: Tensor) -> None:
        with self._changed:
            mine = self._round
            mine.set_clipping(worker, wire.field(request, "coefficient"), wire.field(request, "clip_value"))
            self._advance()
            self._until(lambda: mine.made)
            ending = self._ending_for(worker)
        self._hand_out(link, request, self.shard.flat, **ending)

    def _ending_for(self, worker: int) -> dict[str, float]:
        """Return the reply fields of a notice to end, see :class:`EndNoticeBoard`."""
        heard = self._ending.of(self._clocks.clock(worker)) if worker in self._clocks.workers else None
        if heard is None:
            return {}
        return {"notice": heard.number, "notice_age": heard.age, "steps_left": heard.steps_left}

    def _hand_out(self, link: Link, request: Tensor, parameters: Tensor, **fields: float) -> None:
        """Reply to a step with the parameters: at once, in parts, or not at all."""
        is_quiet, in_parts = wire.field(request, "quiet"), bool(wire.field(request, "pulls_parts"))
        self._reply(link, None if is_quiet else parameters, in_parts, **fields)

    def _rows(self, link: Link, worker: int, request: Tensor) -> None:
        with reading("a request for rows"):
            wanted = link.fetch(torch.empty(whole(request, "bytes") // 8, dtype=torch.int64))
        with self._changed, reading("a request for rows"):
            rows = look_up(wanted, self.shard.split(self.shard.flat))
        self._reply(link, rows)

    def _push_alone(self, link: Link, worker: int, request: Tensor, gradient: Tensor, step: StepRequest) -> None:
        with self._changed:
            self._until(lambda: not self._awaited)
            staleness = self._version - self._seen[worker]
            given = self._given.get(worker)
            if given is not None:  # DC-ASGD (arXiv:1609.08326, section 3, constant lambda)
                gradient += self._options.delay_compensation * gradient * gradient * (self.shard.flat - given)
            # arXiv:1511.05950, section 3.
            factor = 1 / max(1, staleness) if self._options.scale_by_staleness else 1.0
            self.shard.step(gradient, step.present, step.hyper, factor)
            self._version += 1
            self._clocks.tick(worker)
            self._changed.notify_all()
            self._until(lambda: self._clocks.may_proceed(worker))
            self.largest_spread = max(self.largest_spread, self._clocks.clock(worker) - self._clocks.slowest)
            parameters, ending = self._handed_out(worker), self._ending_for(worker)
        self._hand_out(link, request, parameters, staleness=staleness, **ending)

    def _handed_out(self, worker: int) -> Tensor:
        """Return a copy of the parameters, since others may step them during the send."""
        self._seen[worker] = self._version
        parameters = self.shard.flat.clone()
        if self._options.delay_compensation:
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
            if self._options.delay_compensation:
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

    def _put(self, link: Link, worker: int, request: Tensor) -> None:
        flat = link.fetch(torch.empty_like(self.shard.flat))
        with self._changed:
            if self._round.takes_values(worker):
                self.shard.fill(flat)
        self._reply(link)

    def _offer(self, link: Link, worker: int, request: Tensor) -> None:
        self._keep(worker, Offer.receive(link))
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
