"""Snapshots in each rank's memory and in a second rank's, so that a lost rank can be restored.

Restoring from a neighbour's memory is much faster than from a file system, so these can be taken far more often than
checkpoints; they end with the job, so they do not replace checkpoints.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.checkpoint.exchange.distinct import all_gather_values, problems_of_ranks
from trainwright.checkpoint.format.dtypes import dtype_named
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.memory.snapshots import Snapshot
from trainwright.checkpoint.write.save import Content
from trainwright.checkpoint.write.staging import Arena, Staged, Staging, views
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import parse_json

# Largest message in bytes; longer ones are split, so that no 32-bit counter overflows.
_MESSAGE = 2**30
# Twice the deepest nesting of a state: each container is encoded as an object around a list.
_DEEPEST = 400


class _Generation:
    """A snapshot of this rank and one of the rank that it backs up, with memory for both."""

    def __init__(self) -> None:
        self.staging = Staging()
        self.arena = Arena()
        self.own: Snapshot | None = None
        self.guest: tuple[int, Tensor, Tensor] | None = None  # step, header, block

    def clear(self) -> None:
        self.own = self.guest = None


class NeighbourCopies:
    """Last snapshot of every rank, in its own memory and in that of another rank.

    Rank r's copy is kept by rank ``r + distance`` (modulo the world size). The distance is the number of ranks per node
    (``LOCAL_WORLD_SIZE``), so that losing a node loses no copy; 1 with a single node. Two generations are kept: while
    one is being made, the previous one stays complete on all ranks, so an interruption at any time leaves a restorable
    state. That takes host memory of about four times a rank's state.

    Args:
        make_group: creates a gloo group of all ranks for exclusive use (or returns ``None`` for this process alone);
            called once, on all ranks, on first use.
    """

    def __init__(self, make_group: Callable[[], dist.ProcessGroup | None]) -> None:
        self._make_group = make_group
        self._ring: _Ring | None = None
        self._generations = [_Generation(), _Generation()]
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(g.staging.num_bytes + g.arena.num_bytes for g in self._generations)

    def steps(self) -> list[int]:
        """Return the steps of this rank's own snapshots, newest first."""
        return sorted((g.own.step for g in self._generations if g.own is not None), reverse=True)

    def save(self, content: Content, step: int) -> None:
        """Copy this rank's state and send it to its keeper in a thread. A collective.

        Args:
            content: of this rank; it may change as soon as this returns.
            step: optimizer steps done.

        Raises:
            CheckpointError: on every rank, if the previous copy failed.
        """
        self.wait()
        ring = self._connect()
        generation = self._oldest()
        generation.clear()
        problem: BaseException | None = None
        staged: Staged | None = None
        try:
            staged = generation.staging.stage(content.tensors)
        except Exception as error:  # out of memory; reported to the others later
            problem = error

        def run() -> None:
            try:
                with ring.agreeing(problem):
                    assert staged is not None
                    staged.wait()
                    header = pack(content, step)
                generation.own = Snapshot(step, replace(content, tensors=staged.tensors))
                if ring.size > 1:
                    generation.guest = (step, *ring.exchange((header, staged.block), generation.arena))
                with ring.agreeing():
                    pass  # from here on the previous generation may be overwritten
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="trainwright-copy", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no copy is in flight; return whether that is so after ``timeout`` seconds (``None``: no limit).

        Raises:
            CheckpointError: if the copy failed.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"The copy in memory failed; the previous one is complete: {error}") from error
        return True

    def restore(self, have: bool = True) -> Snapshot | None:
        """Return the newest state of which every rank or its keeper holds its part. A collective.

        Args:
            have: ``False``: do not use this rank's own snapshots, but its keeper's. (Those it keeps for another rank
                still count.)

        Returns:
            This rank's part; ``None`` on every rank if there is no such state.
        """
        with suppress(CheckpointError):  # the last copy may have been interrupted
            self.wait()
        ring = self._connect()
        own = {g.own.step: g for g in self._generations if g.own is not None and have}
        guests = {g.guest[0]: g for g in self._generations if g.guest is not None}
        offers = ring.gather((sorted(own), sorted(guests)))
        step = _newest_common(offers, ring.distance)
        if step is None:
            return None
        for generation in self._generations:
            if generation.own is not None and generation.own.step > step:
                generation.clear()  # incomplete across ranks; must be overwritten before the restored one
        lacking = [rank for rank, (steps, _) in enumerate(offers) if step not in steps]
        packed = guests[step].guest[1:] if step in guests else None  # type: ignore[index]
        received = ring.give_back(lacking, packed)
        if received is None:
            held = own[step].own
            assert held is not None
            return held
        held = unpack(*received)
        same = (g for g in self._generations if g.own is not None and g.own.step == held.step)
        next(same, self._oldest()).own = held
        return held

    def release(self) -> None:
        """Drop every copy and free the memory."""
        self.wait()
        self._generations = [_Generation(), _Generation()]

    def _connect(self) -> _Ring:
        if self._ring is None:
            self._ring = _Ring(self._make_group())
        return self._ring

    def _oldest(self) -> _Generation:
        """Return the generation to overwrite: an incomplete one, else the older one."""
        return min(self._generations, key=lambda g: -1 if g.own is None else g.own.step)


def _newest_common(offers: list[tuple[list[int], list[int]]], distance: int) -> int | None:
    """Return the newest step that each rank or its keeper offers."""
    common: set[int] | None = None
    for rank, (own, _) in enumerate(offers):
        kept = offers[(rank + distance) % len(offers)][1] if len(offers) > 1 else []
        steps = {*own, *kept}
        common = steps if common is None else common & steps
    return max(common) if common else None


class _Ring:
    """Communication between a rank, its keeper, and the rank that it backs up."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)
        distance = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.distance = distance % self.size or min(1, self.size - 1)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return [value] if self._group is None else all_gather_values(value, self._group)

    @contextmanager
    def agreeing(self, problem: BaseException | None = None) -> Iterator[None]:
        """Raise on every rank if one has a problem, or an error inside."""
        try:
            yield
        except Exception as error:
            problem = problem or error
        found = problems_of_ranks(None if problem is None else str(problem) or type(problem).__name__, self._group)
        if found:
            raise CheckpointError("; ".join(f"rank {rank}: {text}" for rank, text in found.items())) from problem

    def exchange(self, own: tuple[Tensor, Tensor], arena: Arena) -> tuple[Tensor, Tensor]:
        """Send this rank's parts to its keeper; receive those to keep, the second part into ``arena``."""
        keeper, kept = (self._rank + self.distance) % self.size, (self._rank - self.distance) % self.size
        sizes = torch.tensor([part.numel() for part in own])
        theirs = torch.empty_like(sizes)
        wait_for([*self._start(dist.isend, [sizes], keeper), *self._start(dist.irecv, [theirs], kept)])
        lengths = theirs.tolist()
        with self.agreeing():  # one may run out of memory
            parts = [torch.empty(lengths[0], dtype=torch.uint8), arena.reserve(lengths[1])]
        wait_for([*self._start(dist.isend, own, keeper), *self._start(dist.irecv, parts, kept)])
        return parts[0], parts[1]

    def give_back(self, lacking: list[int], packed: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        """Send ``packed`` to its owner if that lacks it; return what this rank receives if it lacks its own."""
        if self._group is None or not lacking:
            return None
        lengths = self.gather(None if packed is None else [part.numel() for part in packed])
        received, works = None, []
        for rank in lacking:
            keeper = (rank + self.distance) % self.size
            if self._rank == keeper and packed is not None:
                works += self._start(dist.isend, packed, rank)
            if self._rank == rank:
                header, block = (torch.empty(length, dtype=torch.uint8) for length in lengths[keeper])
                received = header, block
                works += self._start(dist.irecv, received, keeper)
        wait_for(works)
        return received

    def _start(self, operation: Callable[..., Any], tensors: Sequence[Tensor], peer: int) -> list[Any]:
        assert self._group is not None
        return start(operation, tensors, peer, self._group)


def start(operation: Callable[..., Any], tensors: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> list[Any]:
    """Start to send or receive tensors, all at once: waiting for each of hundreds would add their latencies.

    Args:
        operation: ``isend`` or ``irecv`` of ``torch.distributed``.
        tensors: as the other rank expects, in the same order.
        peer: the other rank, in ``group``.
        group: over gloo.
    """
    rank = dist.get_global_rank(group, peer)
    pieces = [piece for tensor in tensors if tensor.numel() for piece in tensor.split(_MESSAGE)]
    return [operation(piece, rank, group=group, tag=number) for number, piece in enumerate(pieces)]


def wait_for(works: Sequence[Any]) -> None:
    """Wait until all started transfers are complete."""
    for work in works:
        work.wait()


def pack(content: Content, step: int) -> Tensor:
    """Return a snapshot without the bytes of its tensors, as bytes (uint8).

    Args:
        content: the state.
        step: optimizer steps done.
    """
    tensors = {
        key: [
            str(parts.dtype).removeprefix("torch."),
            list(parts.shape),
            [[list(offsets), list(box.shape)] for offsets, box in parts.parts],
        ]
        for key, parts in content.tensors.items()
    }
    plain = {"step": step, "tree": content.tree, "about": content.about, "tensors": tensors}
    return torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)


def unpack(header: Tensor, block: Tensor) -> Snapshot:
    """Return the snapshot of a ``header`` of :func:`pack`; its boxes are views of ``block`` (uint8).

    Raises:
        CheckpointError: if the header is malformed.
    """
    try:
        plain = parse_json(header.numpy().tobytes(), header.numel(), _DEEPEST)
        tensors = {key: _without_values(*each) for key, each in plain["tensors"].items()}
        return Snapshot(plain["step"], Content(plain["tree"], views(tensors, block), plain["about"]))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The state sent by another rank cannot be read ({error}). Resume from the newest checkpoint on disk with "
            "ckpt_path=last."
        ) from error


def _without_values(dtype: str, shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> TensorParts:
    kind = dtype_named(dtype)
    parts = [(tuple(offsets), torch.empty(sizes, dtype=kind, device="meta")) for offsets, sizes in boxes]
    return TensorParts(shape, kind, parts)
