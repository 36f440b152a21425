"""Buckets of named parameters that are averaged over replicas, with residuals by parameter name.

Buckets keep module order from the first step on, independently of DDP's buckets, which are rebuilt after the first
backward. So residuals keep their position, and resuming is bit-exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.averaging.compression.compressor import GradientCompressor
from trainwright.strategies.contract.collectives.bucketing import bucketed
from trainwright.strategies.contract.gradients import local_tensor

BUCKET_BYTES = 25 * 2**20
# Residual of each element of the bucket, and of each element of this rank's chunk.
RESIDUAL, CHUNK_RESIDUAL = "residual", "chunk_residual"


@dataclass(frozen=True)
class ReplicaPart:
    """Locally optimized part of a parameter, of which other replicas hold copies.

    Args:
        name: of the parameter.
        parameter: as held by the optimizer; of a DTensor, the local part is averaged.
        group: ranks that hold copies; ``None``: all ranks.
        bucket_tag: parts with different tags do not share a bucket. Ranks that hold the same part must agree on it and
            on the other parts of the tag, or copies drift apart.
    """

    name: str
    parameter: Tensor
    group: dist.ProcessGroup | None = None
    bucket_tag: str = ""

    @property
    def local(self) -> Tensor:
        """Local part of the parameter."""
        return local_tensor(self.parameter)

    @property
    def gradient(self) -> Tensor | None:
        """Local part of the gradient."""
        gradient = self.parameter.grad
        return None if gradient is None else local_tensor(gradient)


class CompressedBucket:
    """Parts that are averaged together.

    Args:
        compressor: of the bucket.
        parts: with one group and tag.
        device: of the computation; parts may be offloaded to another.
    """

    def __init__(self, compressor: GradientCompressor, parts: Sequence[ReplicaPart], device: torch.device) -> None:
        self.parts = tuple(parts)
        self.shapes = [tuple(part.local.shape) for part in parts]
        self._compressor = compressor
        self._group = parts[0].group
        self._device = device
        self._sizes = [part.local.numel() for part in parts]
        self._starts = [sum(self._sizes[:index]) for index in range(len(parts))]
        # For exact sums; compression rounds in any case.
        self._exact_dtype = reduce(torch.promote_types, (part.local.dtype for part in parts), torch.float32)
        self.ranks = dist.get_world_size(self._group)
        self.state = compressor.new_state(self.shapes, self.ranks, device)

    @property
    def key(self) -> str:
        """Name of the bucket in checkpoints."""
        return self.parts[0].name

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by this rank per average."""
        return self._compressor.sent_bytes(self.shapes, self.ranks)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """Replace tensors by their approximate means over the group, computed in float32. A collective.

        Args:
            tensors: one per part, of its shape; ``None``: no gradient on any rank; its residual waits.
            scale: factor already in the tensors; residuals are stored without it, so that they outlive it.
        """
        missing = [index for index, tensor in enumerate(tensors) if tensor is None]
        if len(missing) == len(tensors):
            return
        flat = self._packed(tensors, torch.float32)
        if scale != 1:
            flat /= scale
        with self._masked(missing):
            self._compressor.average(flat, self.shapes, self._group, self.state)
        if scale != 1:
            flat *= scale
        self._unpack(flat, tensors)

    @torch.no_grad()
    def average_exactly(self, tensors: Sequence[Tensor | None]) -> None:
        """Replace tensors by their exact means over the group, leaving residuals unchanged.

        Sums are in float32, or in float64 if a part is.
        """
        if any(tensor is not None for tensor in tensors):
            flat = self._packed(tensors, self._exact_dtype)
            dist.all_reduce(flat, group=self._group)
            flat /= self.ranks
            self._unpack(flat, tensors)

    def kept_back(self) -> Iterator[tuple[ReplicaPart, str, Tensor]]:
        """Yield part, kind and value (of the part's shape) of each residual.

        :data:`CHUNK_RESIDUAL` is zero in other ranks' chunks.
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
        """Load residuals by part name; those missing in ``values`` stay."""
        if kind not in self.state:
            return
        for part, start, size in zip(self.parts, self._starts, self._sizes, strict=True):
            if part.name in values:
                value = values[part.name].reshape(-1).to(self._device)
                own, where = (slice(start, start + size), slice(None))
                if kind == CHUNK_RESIDUAL:
                    own, where = self._in_chunk(start, size)
                self.state[kind][own] = value[where]

    def shared_state(self) -> dict[str, Tensor]:
        """Return the per-bucket state by name; views."""
        return {name: value for name, value in self.state.items() if name not in (RESIDUAL, CHUNK_RESIDUAL)}

    def _in_chunk(self, start: int, size: int) -> tuple[slice, slice]:
        """Return the slice of a part within this rank's chunk, and the slice of its elements in that chunk."""
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
                    f"The gradient of {part.name} is sparse, which compression cannot average. Create its module with "
                    "sparse=False, or type compression=none."
                )
            flat[start : start + size] = tensor.reshape(-1)
        return flat

    def _unpack(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
        for tensor, start, size in zip(tensors, self._starts, self._sizes, strict=True):
            if tensor is not None:
                tensor.copy_(flat[start : start + size].view(tensor.shape))

    @contextmanager
    def _masked(self, missing: Sequence[int]) -> Iterator[None]:
        """Exclude parts and their residuals from the average inside."""
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
    compressor: GradientCompressor, parts: Iterable[ReplicaPart], device: torch.device
) -> list[CompressedBucket]:
    """Group parts into buckets of one group and tag, up to :data:`BUCKET_BYTES` of float32."""
    groups = bucketed(
        (part for part in parts if part.local.numel()),
        lambda part: (id(part.group), part.bucket_tag),
        lambda part: 4 * part.local.numel(),
        BUCKET_BYTES,
    )
    return [CompressedBucket(compressor, group, device) for group in groups]
