"""Buckets of named tensors that are averaged over replicas, and what is kept back of each name.

A bucket holds the same parameters from the first step on, in the order of the module: nothing here depends on the
buckets of torch's DDP, which it makes anew after its first backward. So what is kept back always belongs to the same
numbers, and a resumed run goes on to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.averaging.compression.compressor import GradientCompressor
from trainwright.strategies.contract.gradients import local_tensor

# Bytes of a bucket of float32.
BUCKET_BYTES = 25 * 2**20
# What is kept back of each number of the bucket, and of the numbers of this rank's chunk.
RESIDUAL, CHUNK_RESIDUAL = "residual", "chunk_residual"


@dataclass(frozen=True)
class ReplicaPart:
    """What this rank optimizes of a parameter, of which other replicas hold copies.

    Args:
        name: of the parameter.
        parameter: as an optimizer holds it; of a DTensor, the local part counts.
        group: the ranks that hold copies; ``None``: all ranks.
        kin: parts of different kin do not share a bucket. Whoever else holds the same part must hold all of its kin,
            or its copies would drift apart.
    """

    name: str
    parameter: Tensor
    group: dist.ProcessGroup | None = None
    kin: str = ""

    @property
    def local(self) -> Tensor:
        """The part of this rank."""
        return local_tensor(self.parameter)

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of its gradient."""
        gradient = self.parameter.grad
        return None if gradient is None else local_tensor(gradient)


class CompressedBucket:
    """Some parts that are averaged together.

    Args:
        compressor: what averages them.
        parts: of one group and kin.
        device: where averages are computed; parts may lie elsewhere (offloaded).
    """

    def __init__(self, compressor: GradientCompressor, parts: Sequence[ReplicaPart], device: torch.device) -> None:
        self.parts = tuple(parts)
        self.shapes = [tuple(part.local.shape) for part in parts]
        self._compressor = compressor
        self._group = parts[0].group
        self._device = device
        self._sizes = [part.local.numel() for part in parts]
        self._starts = [sum(self._sizes[:index]) for index in range(len(parts))]
        # Of sums that must be exact: what is compressed is rounded in any case.
        self._exact_dtype = reduce(torch.promote_types, (part.local.dtype for part in parts), torch.float32)
        self.ranks = dist.get_world_size(self._group)
        self.state = compressor.new_state(self.shapes, self.ranks, device)

    @property
    def key(self) -> str:
        """What the bucket is known by."""
        return self.parts[0].name

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to average it once."""
        return self._compressor.sent_bytes(self.shapes, self.ranks)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """Replace each tensor by about its mean over the group, computed in float32. A collective.

        Args:
            tensors: one per part, of its shape; ``None``: there is none, on any rank, and what is kept back of it
                waits.
            scale: what the tensors are multiplied by; what is kept back is not, so that it outlives the scale.
        """
        missing = [index for index, tensor in enumerate(tensors) if tensor is None]
        if len(missing) == len(tensors):
            return
        flat = self._packed(tensors, torch.float32)
        if scale != 1:
            flat /= scale
        with self._left_out(missing):
            self._compressor.average(flat, self.shapes, self._group, self.state)
        if scale != 1:
            flat *= scale
        self._unpack(flat, tensors)

    @torch.no_grad()
    def average_exactly(self, tensors: Sequence[Tensor | None]) -> None:
        """Replace each tensor by its mean over the group, uncompressed; nothing that is kept back changes.

        Sums are of float32, or of float64 where a part is.
        """
        if any(tensor is not None for tensor in tensors):
            flat = self._packed(tensors, self._exact_dtype)
            dist.all_reduce(flat, group=self._group)
            flat /= self.ranks
            self._unpack(flat, tensors)

    def kept_back(self) -> Iterator[tuple[ReplicaPart, str, Tensor]]:
        """Part, kind and value (of the part's shape) of all that is kept back of single numbers.

        Of :data:`CHUNK_RESIDUAL`, what is of other ranks' chunks is zero.
        """
        for part, start, shape, size in zip(self.parts, self._starts, self.shapes, self._sizes, strict=True):
            if RESIDUAL in self.state:
                yield part, RESIDUAL, self.state[RESIDUAL][start : start + size].view(shape)
            if CHUNK_RESIDUAL in self.state:
                piece = torch.zeros(size, device=self._device)
                own, where = self._in_chunk(start, size)
                piece[where] = self.state[CHUNK_RESIDUAL][own]
                yield part, CHUNK_RESIDUAL, piece.view(shape)

    @torch.no_grad()
    def keep_back(self, kind: str, values: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`kept_back` gave, by the names of the parts; what is not given stays."""
        if kind not in self.state:
            return
        for part, start, size in zip(self.parts, self._starts, self._sizes, strict=True):
            if part.name in values:
                value = values[part.name].reshape(-1).to(self._device)
                own, where = (slice(start, start + size), slice(None))
                if kind == CHUNK_RESIDUAL:
                    own, where = self._in_chunk(start, size)
                self.state[kind][own] = value[where]

    def others(self) -> dict[str, Tensor]:
        """What else is remembered, of the bucket as a whole, by name; views."""
        return {name: value for name, value in self.state.items() if name not in (RESIDUAL, CHUNK_RESIDUAL)}

    def _in_chunk(self, start: int, size: int) -> tuple[slice, slice]:
        """Of a part: where it lies in this rank's chunk, and which of its numbers do."""
        chunk = self.state[CHUNK_RESIDUAL].numel()
        begin = dist.get_rank(self._group) * chunk
        first, last = max(start, begin), max(min(start + size, begin + chunk), max(start, begin))
        return slice(first - begin, last - begin), slice(first - start, last - start)

    def _packed(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        flat = torch.zeros(sum(self._sizes), dtype=dtype, device=self._device)
        for tensor, start, size, part in zip(tensors, self._starts, self._sizes, self.parts, strict=True):
            if tensor is None:
                continue
            if tensor.layout != torch.strided:
                raise RuntimeError(
                    f"The gradient of {part.name} is sparse, which compression cannot average. Make its module with "
                    "sparse=False, or type compression=none."
                )
            flat[start : start + size] = tensor.reshape(-1)
        return flat

    def _unpack(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
        for tensor, start, size in zip(tensors, self._starts, self._sizes, strict=True):
            if tensor is not None:
                tensor.copy_(flat[start : start + size].view(tensor.shape))

    @contextmanager
    def _left_out(self, missing: Sequence[int]) -> Iterator[None]:
        """Nothing of these parts is sent inside, not even what was kept back of them."""
        kept: list[tuple[Tensor, Tensor]] = []
        for index in missing:
            start, size = self._starts[index], self._sizes[index]
            places = {RESIDUAL: slice(start, start + size)}
            if CHUNK_RESIDUAL in self.state:
                places[CHUNK_RESIDUAL] = self._in_chunk(start, size)[0]
            for kind, place in places.items():
                if kind in self.state:
                    kept.append((self.state[kind][place], self.state[kind][place].clone()))
                    kept[-1][0].zero_()
        yield
        for view, value in kept:
            view.copy_(value)


def make_buckets(
    compressor: GradientCompressor, parts: Sequence[ReplicaPart], device: torch.device
) -> list[CompressedBucket]:
    """Put parts, in their order, into buckets of one group and kin and at most :data:`BUCKET_BYTES` (one at least)."""
    open_parts: dict[tuple[int, str], list[ReplicaPart]] = {}
    groups: list[list[ReplicaPart]] = []
    for part in parts:
        if part.local.numel() == 0:
            continue
        kind = (id(part.group), part.kin)
        held = open_parts.get(kind)
        if held is None or 4 * sum(each.local.numel() for each in (*held, part)) > BUCKET_BYTES:
            held = open_parts[kind] = []
            groups.append(held)
        held.append(part)
    return [CompressedBucket(compressor, group, device) for group in groups]
