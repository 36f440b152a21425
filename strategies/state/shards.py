"""Shards of replicated parameters for the optimizer, and the flat buckets in which they are communicated.

ZeRO stages 1 and 2 replicate parameters, so the user's module runs unmodified. The optimizer gets, for each parameter,
a DTensor sharded along dim 0 whose local tensor is a *view* of this rank's rows: a step updates them in place, without
extra memory. The rows are those of FSDP2, so optimizer state has the same format under every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from trainwright.core.torch_internals import DTensorSpec, TensorMeta
from trainwright.strategies.contract.collectives.bucketing import bucketed
from trainwright.strategies.contract.gradients import local_tensor


class ParameterShard:
    """A parameter and the rows of it that this rank optimizes.

    Args:
        parameter: replicated (a scalar is optimized on all ranks), or a DTensor, whose local tensor is used.
        mesh: axes ``(replicate, shard)`` or ``(shard,)``.
        offload: keep the optimized part, hence the optimizer state, on the CPU.
    """

    def __init__(self, parameter: nn.Parameter, mesh: DeviceMesh, offload: bool = False) -> None:
        self.parameter = parameter
        self.mesh = mesh
        self.count = mesh.size(mesh.ndim - 1)
        self.is_split = parameter.dim() > 0
        last = Shard(0) if self.is_split else Replicate()
        self.placements: tuple[Placement, ...] = (*[Replicate()] * (mesh.ndim - 1), last)
        self.rows = rows_of(parameter, self.count, mesh.get_local_rank(mesh.ndim - 1)) if self.is_split else None
        self.is_offloaded = offload
        part = self.local_part.to("cpu", copy=True) if offload else self.local_part
        self._memory = None if offload or isinstance(parameter, DTensor) else parameter.detach()
        # Replaces the parameter in the optimizer.
        self.optimized = nn.Parameter(self.distributed(part), requires_grad=parameter.requires_grad)

    @property
    def local_part(self) -> Tensor:
        """View of this rank's rows of the parameter."""
        if isinstance(self.parameter, DTensor):
            return local_tensor(self.parameter).detach()
        whole = self.parameter.detach()
        return whole[self.rows[0] : self.rows[1]] if self.rows is not None else whole

    @property
    def optimized_part(self) -> Tensor:
        """This rank's rows in the optimizer: the same memory unless offloaded."""
        return local_tensor(self.optimized)

    @cached_property
    def chunk_numel(self) -> int:
        """Elements per rank in a bucket, with padding; a scalar has one per rank."""
        if not self.is_split:
            return self.count
        rows = -(-self.parameter.shape[0] // self.count)
        return rows * (self.parameter.numel() // max(self.parameter.shape[0], 1))

    def distributed(self, part: Tensor) -> DTensor:
        """Return ``part`` (this rank's rows) as a DTensor of the parameter's global shape."""
        return _dtensor(part, self.mesh, self.placements, self.parameter)

    def keep_memory(self) -> None:
        """Move values that user code has put into other memory (``parameter.data = ...``) into the optimizer's."""
        memory = self._memory
        if memory is None or type(self.parameter) is not nn.Parameter:  # it stands for that of a trial run
            return
        if self.parameter.data_ptr() != memory.data_ptr():
            memory.copy_(self.parameter.detach())
            self.parameter.data = memory

    def publish(self) -> None:
        """Copy offloaded rows back into the parameter."""
        if self.is_offloaded:
            self.local_part.copy_(self.optimized_part, non_blocking=True)

    @property
    def whole_gradient(self) -> Tensor | None:
        """Gradient of backward, before averaging; ``None`` if there is none."""
        gradient = self.parameter.grad
        return None if isinstance(gradient, DTensor) else gradient

    def show_gradient(self) -> None:
        """Set the parameter's ``grad`` to the optimizer's."""
        if not self.is_offloaded:  # torch requires the gradient on the parameter's device
            self.parameter.grad = self.optimized.grad

    def forget_zeroed(self) -> None:
        """Drop the optimizer's gradient if ``zero_grad`` of a module dropped the parameter's."""
        if self.parameter.grad is None and not self.is_offloaded:
            self.optimized.grad = None

    def add_gradient(self, piece: Tensor) -> None:
        """Add this rank's rows of a gradient, or the per-rank parts of a scalar's, to the optimizer's gradient."""
        piece = piece.to(self.optimized_part)
        piece = piece if self.is_split else piece.sum()
        if self.optimized.grad is None:
            # Reuses the part's spec; DTensor.from_local would recompute it, at seven times the cost.
            self.optimized.grad = DTensor(piece, self.optimized._spec, requires_grad=False)  # type: ignore[attr-defined]
        else:
            local_tensor(self.optimized.grad).add_(piece)


def dtensor_like(like: DTensor, part: Tensor) -> DTensor:
    """Return ``part`` as a DTensor sharded like ``like``."""
    return _dtensor(part, like.device_mesh, like.placements, like)


def _dtensor(part: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], whole: Tensor) -> DTensor:
    """Return ``part`` as the local tensor of a DTensor with the shape of ``whole``.

    It stays on its device; ``DTensor.from_local`` would move an offloaded part to the device of the mesh.
    """
    meta = TensorMeta(whole.shape, whole.stride(), part.dtype)
    return DTensor(part.detach(), DTensorSpec(mesh, placements, meta), requires_grad=False)


def spread_like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return ``part`` sharded like ``parameter``, if that is a DTensor."""
    return dtensor_like(parameter, part) if isinstance(parameter, DTensor) else part


def rows_of(tensor: Tensor, count: int, index: int) -> tuple[int, int]:
    """Return rows ``[first, last)`` of dim 0 of shard ``index`` of ``count``, as in ``torch.chunk`` and FSDP2."""
    rows = -(-tensor.shape[0] // count)
    return min(index * rows, tensor.shape[0]), min((index + 1) * rows, tensor.shape[0])


def gradient_problems(
    module: nn.Module, is_split: Callable[[nn.Parameter], bool], stage: int, layout: str
) -> Iterator[str]:
    """Yield reasons why gradients of a module cannot be sharded, each with what to type.

    Args:
        module: unsharded.
        is_split: whether the gradient of a parameter will be sharded.
        stage: of ZeRO; FSDP2 (stage 3) does not mix complex and real parameters.
        layout: its description.
    """
    remedy = "Type strategy=ddp, or"
    for name, parameter in module.named_parameters():
        if not parameter.numel() and parameter.requires_grad and is_split(parameter):
            yield f"{name} has no elements, so {layout} cannot split it. {remedy} freeze it (requires_grad_(False))"
        if stage == 3 and parameter.is_complex() and is_split(parameter):
            yield (
                f"{name} is complex ({parameter.dtype}), and {layout} splits real numbers only. {remedy} "
                "strategy=zero2, or make it real (torch.view_as_real) and view it as complex in forward"
            )
    for name, part in module.named_modules():
        is_sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad
        if is_sparse and is_split(part.weight):
            yield (
                f"{name} ({type(part).__name__}) has sparse=True, and {layout} splits dense gradients only. "
                f"{remedy} leave out sparse=True"
            )


class ShardBucket:
    """Shards communicated together, as ``(count, numel)``: row r belongs to rank r of the shard axis.

    Args:
        shards: of parameters of one dtype.
        dtype: for communication; ``None``: that of the parameters.
    """

    def __init__(self, shards: list[ParameterShard], dtype: torch.dtype | None = None) -> None:
        self.shards = shards
        self.count = shards[0].count
        self.dtype = shards[0].parameter.dtype if dtype is None or self.count == 1 else dtype
        self.numel = sum(shard.chunk_numel for shard in shards)
        self.is_offloaded = shards[0].is_offloaded

    def pack_whole(self, tensors: Iterable[Tensor | None]) -> Tensor:
        """Pack whole tensors, one per shard and ``None`` for zeros, into a buffer ``(count, numel)``."""
        buffer = torch.zeros(self.count, self.numel, dtype=self.dtype, device=self.shards[0].parameter.device)
        for (shard, part), tensor in zip(self._parts(buffer), tensors, strict=True):
            if tensor is not None and shard.is_split:
                for piece, row in _pairs(tensor.reshape(-1), part):
                    row.copy_(piece)
            elif tensor is not None:
                # One element per rank: summed after the exchange, so that all ranks get identical bits.
                part[:, shard.mesh.get_local_rank(shard.mesh.ndim - 1)] = tensor
        return buffer

    def _parts(self, buffer: Tensor) -> Iterator[tuple[ParameterShard, Tensor]]:
        """Yield each shard with a view of its part of a buffer ``(..., numel)``."""
        offset = 0
        for shard in self.shards:
            yield shard, buffer[..., offset : offset + shard.chunk_numel]
            offset += shard.chunk_numel

    def pack_own(self) -> Tensor:
        """Pack this rank's rows of all shards into a buffer ``(numel,)``."""
        buffer = torch.zeros(self.numel, dtype=self.dtype, device=self.shards[0].parameter.device)
        for shard, piece in self.pieces(buffer):
            piece.copy_(shard.optimized_part)
        return buffer

    def pieces(self, row: Tensor) -> Iterator[tuple[ParameterShard, Tensor]]:
        """Yield views of ``row`` (``(numel,)``, this rank's) in the shape of each shard; of a scalar, ``(count,)``."""
        for shard, part in self._parts(row):
            shape = shard.optimized_part.shape if shard.is_split else torch.Size([shard.count])
            yield shard, part[: shape.numel()].view(shape)

    @torch.no_grad()
    def unpack_whole(self, buffer: Tensor) -> None:
        """Write a buffer ``(count, numel)`` of all ranks' rows into the parameters."""
        for shard, part in self._parts(buffer):
            if shard.is_split:
                for piece, row in _pairs(shard.parameter.detach().view(-1), part):
                    piece.copy_(row)
            else:
                shard.parameter.copy_(part[0, 0])


def _pairs(flat: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield corresponding views of a flat tensor and of its chunks ``(count, chunk)``, of which the last is padded."""
    full, rest = divmod(flat.numel(), rows.shape[1])
    yield flat[: full * rows.shape[1]].view(full, -1), rows[:full]
    if rest:
        yield flat[full * rows.shape[1] :], rows[full, :rest]


def make_buckets(
    shards: Iterable[ParameterShard], bucket_bytes: int, dtype: torch.dtype | None = None
) -> list[ShardBucket]:
    """Group shards in order into buckets of at most ``bucket_bytes`` (at least one shard) and of one dtype and device.

    ``dtype`` is that of communication, see :class:`ShardBucket`.
    """
    groups = bucketed(
        shards,
        lambda shard: (shard.parameter.dtype, shard.parameter.device),
        lambda shard: shard.parameter.numel() * shard.parameter.element_size(),
        bucket_bytes,
    )
    return [ShardBucket(group, dtype) for group in groups]
