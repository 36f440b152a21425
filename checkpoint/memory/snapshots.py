"""Snapshots of a rank's run state in memory, and reading from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.format.boxes import extent_of
from trainwright.checkpoint.format.directory import OF_RANK
from trainwright.checkpoint.format.parts import TensorParts, copy_common
from trainwright.checkpoint.format.tree import decode
from trainwright.checkpoint.read.run_state import StoredTensor
from trainwright.checkpoint.write.save import Content
from trainwright.checkpoint.write.staging import Staging
from trainwright.core.errors import CheckpointError
from trainwright.core.text.bounded import interpreting


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of the state of a step; resume from it with ``fit(..., ckpt_path=snapshot)``.

    Args:
        step: optimizer steps done.
        content: its tree and tensor boxes; later snapshots may overwrite the memory of the boxes.
        copied: CUDA event recorded after the copy; ``None``: already copied.
    """

    step: int
    content: Content
    copied: Any = None

    def __repr__(self) -> str:
        return f"the copy in memory of step {self.step}"  # replaces a path in messages

    def wait(self) -> None:
        """Block until the copy is complete; returns at once if nothing came from a CUDA device."""
        if self.copied is not None:
            self.copied.synchronize()


PENDING = Snapshot(0, Content({}, {}, {}))
"""Placeholder for a snapshot that other ranks send after setup, see ``joins`` of the strategy's traits."""


# ---- ring buffer ----------------------------------------------------------------------------------------------------


@dataclass
class _Place:
    """Memory for one snapshot, reused for later ones."""

    staging: Staging
    held: Snapshot | None = None


class Snapshots:
    """The last snapshots of this rank, in its own host memory; no communication.

    Copies from a CUDA device go into page-locked memory on a separate stream, so that taking one does not wait for the
    device. Memory for ``keep`` states is allocated once and reused.

    Args:
        keep: number of snapshots; the oldest is overwritten by the next one.

    Raises:
        ValueError: if ``keep`` is less than 1.
    """

    def __init__(self, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"Snapshots(keep={keep}) (allowed: 1 or more)")
        self._places = [_Place(Staging()) for _ in range(keep)]

    def keep_at_least(self, count: int) -> None:
        """Increase ``keep`` to at least ``count``."""
        self._places += [_Place(Staging()) for _ in range(count - len(self._places))]

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(place.staging.num_bytes for place in self._places)

    def steps(self) -> list[int]:
        """Return the steps of the snapshots, newest first."""
        return sorted((place.held.step for place in self._places if place.held is not None), reverse=True)

    def take(self, content: Content, step: int) -> Snapshot:
        """Take a snapshot; it replaces one of the same step, else the oldest if there are ``keep``.

        Args:
            content: of this rank; it may change as soon as this returns.
            step: optimizer steps done.
        """
        place = min(self._places, key=lambda place: _age(place, step))
        place.held = None  # a failed copy must not leave a partial snapshot
        staged = place.staging.stage(content.tensors)
        place.held = Snapshot(step, replace(content, tensors=staged.tensors), staged.copied)
        return place.held

    def newest(self, before_or_at: int | None = None) -> Snapshot | None:
        """Return the newest snapshot of step ``before_or_at`` or earlier; ``None``: there is none.

        It is valid until it is overwritten, ``keep`` snapshots later.
        """
        held = [place.held for place in self._places if place.held is not None]
        held = [each for each in held if before_or_at is None or each.step <= before_or_at]
        return max(held, key=lambda each: each.step, default=None)

    def oldest(self) -> Snapshot | None:
        """Return the oldest snapshot; ``None``: there is none."""
        held = [place.held for place in self._places if place.held is not None]
        return min(held, key=lambda each: each.step, default=None)

    def forget_after(self, step: int) -> None:
        """Drop the snapshots of later steps, after a roll-back to ``step``."""
        for place in self._places:
            if place.held is not None and place.held.step > step:
                place.held = None

    def release(self) -> None:
        """Drop all snapshots and free the memory."""
        for place in self._places:
            place.held = None
            place.staging.release()


def _age(place: _Place, step: int) -> tuple[int, int]:
    """Return a sort key, lowest for what to overwrite first: the same step, a free place, the oldest."""
    if place.held is None:
        return (1, 0)
    return (0, 0) if place.held.step == step else (2, place.held.step)


# ---- reading --------------------------------------------------------------------------------------------------------


class SnapshotReader:
    """Reader of a :class:`Snapshot`, the counterpart of ``RunState`` on disk.

    A ``TensorSource`` of what this rank holds: it serves the layout it was made under, and others in which this rank
    holds nothing more, such as other numbers of replicas.

    Args:
        held: complete, see ``complete`` of ``strategy.run_state``.
    """

    def __init__(self, held: Snapshot) -> None:
        held.wait()
        self.path = str(held)
        self._content = held.content
        self._tensors: Mapping[str, TensorParts] = held.content.tensors

    @property
    def about(self) -> Mapping[str, Any]:
        """Description, as in a manifest."""
        return self._content.about

    @cached_property
    def tree(self) -> dict[str, Any]:
        """Everything that is not a tensor; tensors are :class:`StoredTensor`."""
        with interpreting(self.path, "Resume from the newest checkpoint on disk with ckpt_path=last."):
            tree: dict[str, Any] = decode(self._content.tree, lambda key: StoredTensor(self, key))
        return tree

    def keys(self) -> Collection[str]:
        """Return the names of the tensors that this rank holds, wholly or partly."""
        return self._tensors.keys()

    def keys_under(self, prefix: str) -> list[str]:
        """Return the names that begin with ``prefix``."""
        return [key for key in self._tensors if key.startswith(prefix)]

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor.

        Raises:
            CheckpointError: if this rank holds nothing of it.
        """
        return self._parts(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """Return its dtype.

        Raises:
            CheckpointError: if this rank holds nothing of it.
        """
        return self._parts(key).dtype

    def read(self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Copy a box of a tensor, see :class:`~trainwright.checkpoint.format.source.TensorSource`.

        Raises:
            CheckpointError: if this rank does not hold all of it.
        """
        parts = self._parts(key)
        offsets, sizes = extent_of(parts.shape, offsets, sizes)
        target = torch.empty(sizes, dtype=parts.dtype)
        self.fill({key: TensorParts(parts.shape, parts.dtype, [(offsets, target)])})
        return target

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, TensorParts]) -> None:
        """Copy into the boxes of ``tensors``, in place, converted to their dtype and device.

        Raises:
            CheckpointError: if this rank does not hold all of them; those before are already copied.
        """
        for key, wanted in tensors.items():
            held = self._parts(key)
            if held.shape != wanted.shape:
                raise CheckpointError(f"{self.path}: {key} of shape {wanted.shape} was requested, it has {held.shape}.")
            for part in wanted.parts:
                copied = sum(copy_common(part, own) for own in held.parts)
                if copied != part[1].numel():
                    raise self._not_held(f"{copied} of the {part[1].numel()} elements of {key} at {part[0]}")

    # ---- tensors sharded over ranks --------------------------------------------------------------------------------

    def is_whole(self, key: str) -> bool:
        """Return whether this rank holds all of a tensor."""
        parts = self._parts(key)
        return sum(tensor.numel() for _, tensor in parts.parts) == math.prod(parts.shape)

    def parts(self) -> dict[str, TensorParts]:
        """Return copies of the tensors of this rank, without rank-local ones."""
        # Cloned, since sending a view sends its whole storage.
        return {key: parts.map(Tensor.clone) for key, parts in self._tensors.items() if not key.startswith(OF_RANK)}

    def joined(self, of_ranks: Sequence[Mapping[str, TensorParts]]) -> SnapshotReader:
        """Return a reader that also has the parts of other ranks.

        Args:
            of_ranks: :meth:`parts` of every rank.
        """
        tensors = dict(self._tensors)
        for key, parts in (item for rank in of_ranks for item in rank.items()):
            own = tensors.get(key)
            known = {} if own is None else dict(own.parts)
            more = [(offsets, box) for offsets, box in parts.parts if offsets not in known]
            tensors[key] = TensorParts(parts.shape, parts.dtype, [*known.items(), *more])
        joined = copy.copy(self)
        joined.__dict__.pop("tree", None)  # its tensors refer to this reader
        joined._tensors = tensors
        return joined

    def _parts(self, key: str) -> TensorParts:
        if key not in self._tensors:
            raise self._not_held(f"nothing of {key}")
        return self._tensors[key]

    def _not_held(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path[0].upper()}{self.path[1:]} holds {what} on this rank. A rank can resume from memory if it "
            "holds what it held before (the same layout, or another number of replicas); resume from a checkpoint on "
            "disk, which serves any layout."
        )
