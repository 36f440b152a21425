"""Client of a worker: pushes gradients to all servers and pulls parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor, nn

from trainwright.checkpoint.write.save import Content
from trainwright.core.run.peers import EndNotice, ReceivedNotice
from trainwright.strategies.averaging.compression.codecs import Codec
from trainwright.strategies.averaging.compression.compressor import encode_with_feedback
from trainwright.strategies.contract.same_model import are_equal
from trainwright.strategies.parameter_server.messages import requests, sparse_rows, wire
from trainwright.strategies.parameter_server.messages.packing import State, pack, unpack
from trainwright.strategies.parameter_server.messages.requests import BYTES, Operation, Status, request_size
from trainwright.strategies.parameter_server.messages.wire import HEADER, PAYLOAD, Device, Link, Sending
from trainwright.strategies.parameter_server.server.rendezvous import ServerRendezvous
from trainwright.strategies.parameter_server.server.shard import ShardPlan, join_norms, join_state, split_state
from trainwright.strategies.parameter_server.server.sharder import Slice, places
from trainwright.strategies.parameter_server.worker.deferred_pull import DeferredPull, put_slices
from trainwright.strategies.parameter_server.worker.overlapped_push import OverlappedPush, copy_slice, rows
from trainwright.strategies.parameter_server.worker.rejoining import Offer


class ServerGoneError(RuntimeError):
    """Lost parameter server, with its state."""


class Client:
    """Connection of one worker to all servers.

    Args:
        worker: its index.
        plan: of what is served.
        parameters: this worker's, in plan order.
        meeting: rendezvous with the servers.
        device: of links.
        codec: of gradients; ``None``: uncompressed. Errors are fed back into the next push, per server.
        tables: indices of embedding parameters, of which a batch touches few rows; only these are sent, unless there is
            a codec. Likewise for sparse gradients.
        module: of the parameters. With it, and if the plan has parts, a step leaves pulls pending until they are
            needed; readers of parameters outside of :meth:`watched` must call :meth:`settle` first. ``None``: a step
            waits for all.

    If the plan has parts and there is no codec, gradients are pushed during backward, see :meth:`begin`.
    """

    def __init__(
        self,
        worker: int,
        plan: ShardPlan,
        parameters: Sequence[Tensor],
        meeting: ServerRendezvous,
        device: Device,
        codec: Codec | None = None,
        tables: Collection[int] = (),
        module: nn.Module | None = None,
    ) -> None:
        self.worker = worker
        self.prefix = meeting.prefix
        """Prefix of keys in the store that belong to this fit."""
        self.sent_bytes = 0
        """Bytes of pushed gradients, without headers."""
        self.staleness = 0
        """Steps of others between the last pull and its push, at the server with most."""
        self.heard: ReceivedNotice | None = None
        """Notice of the end of the run, and this worker's remaining steps, as of the last step or meeting."""
        self.notice: Callable[[], EndNotice | None] = lambda: None
        """Called at each push for this worker's notice of the end; the first server tells all."""
        self.wants_offer = True
        """True if the first server asked for :meth:`offer` in its last reply."""
        self.plan, self._parameters, self._codec = plan, list(parameters), codec
        self._meeting, self._device, self._tables = meeting, device, frozenset(tables)
        self._links: list[Link] = []
        self.free()
        self.pushes_early = True
        """True if gradients may be pushed during backward; read by :meth:`connect`."""
        self._overlapped: OverlappedPush | None = None
        self._deferred: DeferredPull | None = None
        self._module = module
        self._versions: dict[int, int] = {}  # of parameters, after the last pull
        self.residuals = None if codec is None else [torch.zeros_like(flat) for flat in self._gradients]
        """Compression residual, one vector per server; ``None`` without a codec."""

    # ---- beginning and end ------------------------------------------------------------------------------------------

    def connect(self) -> int:
        """Connect to all servers; returns the initial clock.

        Raises:
            ServerGoneError: if a server is missing or rejects this worker.
        """
        proofs = []
        for server in range(len(self.plan.held)):
            name = self._meeting.announce(server, self.worker)
            proofs.append(self._meeting.proof(name))
            lost = partial(self._lost, server)
            self._links.append(Link(self._meeting.client(), name, False, self._device, lost))
        digest = self.plan.digest
        hellos = {s: self._send(s, Operation.HELLO, digest=digest, proof=proof) for s, proof in enumerate(proofs)}
        replies = self._receive(hellos)
        if any(self.plan.parts) and self._codec is None and self.pushes_early:
            announce = partial(self._send, operation=Operation.PARTS)
            self._overlapped = OverlappedPush(self.plan, self._parameters, self._gradients, announce, self._send_part)
        if any(self.plan.parts) and self._module is not None:
            self._deferred = DeferredPull(
                self.plan, self._parameters, self._pulled, self._module, self._links, self._versions
            )
        return int(max(wire.field(reply, "clock") for reply in replies))

    def leave(self) -> None:
        """Leave regularly."""
        self.settle()
        links, self._links = self._links, []  # a lost server must not affect the others
        for server, link in enumerate(links):
            with suppress(ServerGoneError):
                link.send(self._request(server, Operation.LEAVE), HEADER).wait()
            link.close()
        self.drop()

    def drop(self) -> None:
        """Disconnect."""
        self._stop_overlap()
        late, self._deferred = self._deferred, None
        if late is not None:
            late.close()
        for link in self._links:
            link.close()
        self._links = []

    # ---- steps ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Announce that the next backward is the last of a step, so that gradients are pushed during it.

        Later changes count: changed gradients are pushed again in :meth:`step`.
        """
        if self._overlapped is None:
            return
        if self._overlapped.is_ineffective:
            self._stop_overlap()
        else:
            self._overlapped.begin()

    def step(
        self, hyper: Tensor, clip_value: float = 0.0, coefficient: float | None = None, pulls: bool = True
    ) -> None:
        """Push gradients, and pull parameters once the servers let this worker proceed.

        Args:
            hyper: options of the optimizer's groups.
            clip_value: clamps elements of the averaged gradient, where workers step together; 0: off.
            coefficient: scales the averaged gradient of an earlier :meth:`push`, instead of a push.
            pulls: ``False``, where workers step together: leave the parameters on the servers.
        """
        late = pulls and self._deferred is not None and self._deferred.may_wait
        fields: dict[str, float] = {"clip_value": clip_value, "quiet": not pulls, "pulls_parts": late}
        if coefficient is None:
            sent = self._push(hyper, **fields)
        else:
            sent = self._send_all(Operation.COMMIT, coefficient=coefficient, **fields)
        replies = self._receive(sent, self._pulled if pulls and not late else (), late=late)
        self.staleness = int(max(wire.field(reply, "staleness") for reply in replies))
        self._read_notice(replies[0])
        if pulls and not late:
            self._take()

    def settle(self) -> None:
        """Wait for all pending pulls."""
        if self._deferred is not None:
            self._deferred.settle()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Wait for each pending parameter on first use in a ``with`` block, and for all at its end."""
        late = self._deferred
        with nullcontext() if late is None or late.has_all else late.watch():
            yield
        self.settle()

    def push(self, hyper: Tensor) -> Tensor:
        """Push gradients; returns norms of their average. Must be followed by :meth:`step` with a coefficient.

        Returns:
            The norm of each parameter's gradient in plan order, without those that no worker has.
        """
        norms = [torch.zeros(len(held), dtype=torch.float64) for held in self.plan.held]
        self._receive(self._push(hyper, hold=1), norms)
        return join_norms(self.plan, norms)

    def pull(self, into: Sequence[Tensor] | None = None) -> None:
        """Pull the servers' parameters.

        Args:
            into: tensors in plan order; ``None``: this worker's parameters.
        """
        self._receive(self._send_all(Operation.PULL), self._pulled)
        self._take(into)

    def free(self) -> None:
        """Free message buffers, which are as large as all parameters, until the next use."""
        self._gradients = [torch.zeros(self.plan.numel(s), dtype=self.plan.dtype) for s in range(len(self.plan.held))]
        self._pulled = [torch.empty_like(flat) for flat in self._gradients]

    def pull_rows(self, index: int, numbers: Tensor) -> Tensor:
        """Pull rows of one parameter, ``(k, ...)`` on the CPU.

        Args:
            index: of the parameter in the plan.
            numbers: row indices, int64 ``(k,)``, ascending, on the CPU.
        """
        width = math.prod(self.plan.shapes[index][1:])
        rows = torch.empty(numbers.numel(), width, dtype=self.plan.dtype)
        sent, found = {}, {}
        for server, held in enumerate(self.plan.held):
            wanted = [sparse_rows.rows_within(numbers, p) if p.parameter == index else numbers[:0] for p in held]
            if count := sum(each.numel() for each in wanted):
                body = sparse_rows.ask_for(wanted)
                sent[server] = self._send(server, Operation.ROWS, (body, PAYLOAD), bytes=body.nbytes)
                found[server] = torch.empty(count, width, dtype=self.plan.dtype)
        self._receive(sent, list(found.values()))
        for server, values in found.items():
            first = 0
            for piece in self.plan.held[server]:
                if piece.parameter == index:
                    start, stop = torch.searchsorted(numbers, torch.tensor([piece.start, piece.stop])).tolist()
                    rows[start:stop] = values[first : first + stop - start]
                    first += stop - start
        return rows.view(-1, *self.plan.shapes[index][1:])

    def meet(self, keeps: bool = False) -> int:
        """Wait for all workers, and pull parameters, equal on all.

        Args:
            keeps: whether this worker's parameters stay as they are.

        Returns:
            How often lost workers have rejoined, equal on all.
        """
        replies = self._receive(self._send_all(Operation.MEET), self._pulled)
        self._read_notice(replies[0])
        if not keeps:
            self._take()
        return int(wire.field(replies[0], "returns"))

    def _read_notice(self, reply: Tensor) -> None:
        number = int(wire.field(reply, "notice"))
        left = int(wire.field(reply, "steps_left"))
        self.heard = ReceivedNotice(number, wire.field(reply, "notice_age"), left) if number else None

    def _notice_fields(self, server: int) -> dict[str, float]:
        """Return the push fields of this worker's notice of the end."""
        notice = self.notice() if server == 0 else None
        return {} if notice is None else {"notice": notice.number, "notice_age": notice.age}

    def offer(self, content: Content, step: int) -> None:
        """Send a copy of the run's state to the first server, for rejoining workers.

        Args:
            content: complete, see ``complete`` of ``strategy.run_state``.
            step: optimizer steps done.
        """
        offer = Offer.of(content, step)
        sent = self._send(0, Operation.OFFER)
        offer.give(self._links[0])
        self._receive({0: sent})

    def traffic(self) -> list[tuple[int, int]]:
        """Return the messages and bytes that each server has sent so far, to all workers."""
        replies = self._receive(self._send_all(Operation.TRAFFIC))
        return [(int(wire.field(reply, "messages")), int(wire.field(reply, "sent"))) for reply in replies]

    def vote(self, value: float) -> float:
        """Return the largest value of all workers, via the first server."""
        (reply,) = self._receive({0: self._send(0, Operation.VOTE, vote=value)})
        return wire.field(reply, "vote")

    def _send_part(self, server: int, part: Tensor, tag: int) -> Sending:
        self.sent_bytes += part.nbytes
        return self._links[server].send(part, tag)

    def _stop_overlap(self) -> None:
        early, self._overlapped = self._overlapped, None
        if early is not None:
            early.close()

    def _push(self, hyper: Tensor, **fields: float) -> dict[int, list[Sending]]:
        sent = {}
        for server, flat in enumerate(self._gradients):
            held, early = self.plan.held[server], None if self._overlapped is None else self._overlapped.end(server)
            has = torch.tensor([self._parameters[p.parameter].grad is not None for p in held])
            marks = has.double() * requests.HAS_GRADIENT
            on_their_way: list[Sending] = []
            if early is None:
                body, is_packed = self._message(server, held, flat)
            else:
                on_their_way, late = early
                marks[late] += requests.IS_LATE
                body, is_packed = self._rest_message([held[each] for each in late], flat), True
            fields |= {"bytes": body.nbytes if is_packed else 0, "parts": early is not None}
            request = self._request(server, Operation.PUSH, **fields, **self._notice_fields(server))
            request[wire.FIXED : wire.FIXED + hyper.numel()] = hyper
            request[wire.FIXED + hyper.numel() :] = marks
            self.sent_bytes += body.nbytes
            link = self._links[server]
            sent[server] = [*on_their_way, link.send(request, HEADER), link.send(body, PAYLOAD)]
        return sent

    def _message(self, server: int, held: Sequence[Slice], flat: Tensor) -> tuple[Tensor, bool]:
        """Return this worker's gradients for a server, and whether they are packed as sparse rows."""
        rows = self._gather(held, flat)
        if any(each is not None for each in rows):
            return sparse_rows.pack_rows(flat, held, rows), True
        if self._codec is None:
            return flat, False
        assert self.residuals is not None
        return encode_with_feedback(self._codec, flat[None], self.residuals[server][None])[0], False

    def _rest_message(self, pieces: Sequence[Slice], flat: Tensor) -> Tensor:
        """Return the gradients that follow those sent during backward."""
        if not pieces:
            return flat[:0]
        memory = flat.new_empty(sum(piece.numel for piece in pieces))
        return sparse_rows.pack_rows(memory, pieces, self._gather(pieces, memory))

    def _gather(self, pieces: Sequence[Slice], flat: Tensor) -> list[sparse_rows.Rows | None]:
        """Copy gradients of slices into ``flat``; returns sparse rows where these are shorter."""
        touched: list[sparse_rows.Rows | None] = []
        for piece, place in places(pieces, flat):
            gradient = self._parameters[piece.parameter].grad
            touched.append(self._few_rows(gradient, piece))
            if touched[-1] is None:
                copy_slice(gradient, piece, place)
        return touched

    def _few_rows(self, gradient: Tensor | None, piece: Slice) -> sparse_rows.Rows | None:
        if gradient is None or gradient.dim() < 2 or self._codec is not None:
            return None
        if not gradient.is_sparse and piece.parameter not in self._tables:
            return None
        return sparse_rows.touched_rows(gradient, piece)

    def _take(self, into: Sequence[Tensor] | None = None) -> None:
        """Copy pulled values into parameters."""
        parameters, versions = (self._parameters, self._versions) if into is None else (into, None)
        for held, flat in zip(self.plan.held, self._pulled, strict=True):
            put_slices(held, flat, parameters, versions)

    # ---- states -----------------------------------------------------------------------------------------------------

    def state(self) -> list[State]:
        """Return the optimizer state of every parameter, whole, in plan order."""
        states = []
        for server, reply in enumerate(self._receive(self._send_all(Operation.STATE))):
            data = self._links[server].fetch(torch.empty(int(wire.field(reply, "bytes")), dtype=torch.uint8), BYTES)
            states.append(unpack(data, int(wire.field(reply, "text"))))
        return join_state(self.plan, states)

    def load(self, states: Sequence[State]) -> None:
        """Send this worker's parameters and optimizer states to the servers; no worker may push meanwhile."""
        for server, of_server in enumerate(split_state(self.plan, states)):
            data, text = pack(of_server)
            bodies = (self._own_values(server), PAYLOAD), (data, BYTES)
            self._receive({server: self._send(server, Operation.LOAD, *bodies, bytes=data.numel(), text=text)})

    def put(self) -> None:
        """Send this worker's parameters to the servers, which keep the optimizer states, before the push of a step.

        Servers take those of the first worker that sends any.
        """
        sent = {s: self._send(s, Operation.PUT, (self._own_values(s), PAYLOAD)) for s in range(len(self._links))}
        self._receive(sent)

    @property
    def has_seen_writes(self) -> bool:
        """True if torch has counted a write to parameters since the last pull; it does not count those to ``.data``."""
        self.settle()
        return any(self._parameters[index]._version != version for index, version in self._versions.items())

    @property
    def has_pulled_values(self) -> bool:
        """True if the parameters are those of the last pull, not written since."""
        self.settle()
        return all(
            are_equal(value.view(piece.shape), rows(self._parameters[piece.parameter].detach(), piece))
            for held, flat in zip(self.plan.held, self._pulled, strict=True)
            for piece, value in places(held, flat)
        )

    def _own_values(self, server: int) -> Tensor:
        for piece, place in places(self.plan.held[server], self._pulled[server]):
            copy_slice(self._parameters[piece.parameter].detach(), piece, place)
        return self._pulled[server]

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _request(self, server: int, operation: Operation, **fields: float) -> Tensor:
        self.settle()  # pending pulls must come first
        return wire.header(request_size(self.plan, server), operation=operation, **fields)

    def _send(self, server: int, operation: Operation, *bodies: tuple[Tensor, int], **fields: float) -> list[Sending]:
        """Start sending a request and its bodies, each with its tag."""
        request, link = self._request(server, operation, **fields), self._links[server]
        return [link.send(tensor, tag) for tensor, tag in ((request, HEADER), *bodies)]

    def _send_all(self, operation: Operation, **fields: float) -> dict[int, list[Sending]]:
        return {server: self._send(server, operation, **fields) for server in range(len(self._links))}

    def _receive(
        self, sent: Mapping[int, Sequence[Sending]], bodies: Sequence[Tensor] = (), late: bool = False
    ) -> list[Tensor]:
        """Receive the replies of all servers that something was sent to, concurrently.

        Args:
            sent: by server.
            bodies: buffers of payloads after each reply; empty: none.
            late: parameters follow in parts, to be taken later.
        """
        replies = {server: torch.zeros(wire.FIXED, dtype=torch.float64) for server in sent}
        coming = {server: self._links[server].receive(reply, HEADER) for server, reply in replies.items()}
        following = {
            server: self._links[server].receive(body, PAYLOAD) for server, body in zip(sent, bodies, strict=False)
        }
        if late and self._deferred is not None:
            self._deferred.begin()
        for server, reply in replies.items():
            for each in (*sent[server], coming[server]):
                each.wait()
            self._refuse_ended(server, reply)
            if server == 0:
                self.wants_offer = bool(wire.field(reply, "wanted"))
            if server in following:
                following[server].wait()
        return list(replies.values())

    def _refuse_ended(self, server: int, reply: Tensor) -> None:
        if int(wire.field(reply, "operation")) == Status.OK:
            return
        text = self._links[server].fetch(torch.empty(int(wire.field(reply, "bytes")), dtype=torch.uint8), BYTES)
        raise self._lost(server, bytes(text.numpy()).decode())

    def _lost(self, server: int, why: str) -> ServerGoneError:
        self.drop()
        return ServerGoneError(
            f"Parameter server {server} is gone ({why}), with the parameters that it held. Resume from the latest "
            "checkpoint with ckpt_path=last, or let the command do so automatically with launch.max_restarts=3."
        )
