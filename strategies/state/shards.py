"""The part of each replicated parameter that one rank optimizes, and the flat buckets in which parts travel.

ZeRO stages 1 and 2 keep every parameter whole on every rank, so the user's module runs as it is. What the optimizer
sees instead is, for each parameter, a DTensor split along dim 0 whose local part is a *view* of this rank's rows of
the whole parameter: stepping it steps those rows in place and costs no memory. The rows are the ones that FSDP2 would
give the rank, so optimizer state has the same form under every stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from trainwright.strategies.contract.gradients import local_tensor


class ParameterShard:
    """One parameter and the rows of it that this rank optimizes.

    Args:
        parameter: the whole parameter, the same on every rank (a scalar cannot be split and is optimized by all), or
            one that is split already (a DTensor), whose local part is taken.
        mesh: axes ``(replicate, shard)`` or ``(shard,)``.
        offload: keep the optimized part (and so the optimizer state) on the CPU.
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
        # What the optimizer holds in place of the parameter.
        self.optimized = nn.Parameter(self.distributed(part), requires_grad=parameter.requires_grad)

    @property
    def local_part(self) -> Tensor:
        """View of this rank's rows of the whole parameter."""
        if isinstance(self.parameter, DTensor):
            return local_tensor(self.parameter).detach()
        whole = self.parameter.detach()
        return whole[self.rows[0] : self.rows[1]] if self.rows is not None else whole

    @property
    def optimized_part(self) -> Tensor:
        """This rank's rows as the optimizer holds them: the same memory unless offloaded."""
        return local_tensor(self.optimized)

    @cached_property
    def chunk_numel(self) -> int:
        """Elements that each rank contributes to a bucket, padding included; a scalar has a place per rank."""
        if not self.is_split:
            return self.count
        rows = -(-self.parameter.shape[0] // self.count)
        return rows * (self.parameter.numel() // max(self.parameter.shape[0], 1))

    def distributed(self, part: Tensor) -> DTensor:
        """``part`` (this rank's rows) as a DTensor of the parameter's global shape."""
        return DTensor.from_local(
            part,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.parameter.shape,
            stride=self.parameter.stride(),
        )

    def publish(self) -> None:
        """Copy the rows that the optimizer stepped elsewhere (offloaded) back into the parameter."""
        if self.is_offloaded:
            self.local_part.copy_(self.optimized_part, non_blocking=True)

    @property
    def whole_gradient(self) -> Tensor | None:
        """The gradient that backward has left on the parameter, before it is averaged; ``None`` if there is none."""
        gradient = self.parameter.grad
        return None if isinstance(gradient, DTensor) else gradient

    def show_gradient(self) -> None:
        """Let the parameter's ``grad`` be the one that the optimizer sees."""
        if not self.is_offloaded:  # torch wants a gradient on the parameter's own device
            self.parameter.grad = self.optimized.grad

    def forget_zeroed(self) -> None:
        """Drop what the optimizer sees if ``zero_grad`` of a module has dropped what the parameter shows."""
        if self.parameter.grad is None and not self.is_offloaded:
            self.optimized.grad = None

    def add_gradient(self, piece: Tensor) -> None:
        """Add this rank's rows of a gradient, or the parts of a scalar's by rank, to what the optimizer will see."""
        piece = piece.to(self.optimized_part)
        piece = piece if self.is_split else piece.sum()
        if self.optimized.grad is None:
            # Laid out like the part itself; DTensor.from_local would work that out anew, at seven times the cost.
            self.optimized.grad = DTensor(piece, self.optimized._spec, requires_grad=False)  # type: ignore[attr-defined]
        else:
            local_tensor(self.optimized.grad).add_(piece)


def rows_of(tensor: Tensor, count: int, index: int) -> tuple[int, int]:
    """Rows ``[first, last)`` of dim 0 that part ``index`` of ``count`` holds: those of ``torch.chunk`` and of FSDP2."""
    rows = -(-tensor.shape[0] // count)
    return min(index * rows, tensor.shape[0]), min((index + 1) * rows, tensor.shape[0])


def gradient_problems(
    module: nn.Module, is_split: Callable[[nn.Parameter], bool], stage: int, layout: str
) -> Iterator[str]:
    """Why gradients of a module cannot be split over ranks, each with what to type.

    Args:
        module: whole.
        is_split: whether the gradient of a parameter is to be.
        stage: of ZeRO; FSDP2, which is stage 3, takes no complex parameters beside real ones.
        layout: in words.
    """
    remedy = "Type strategy=ddp, or"
    for name, parameter in module.named_parameters():
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
    """Shards that travel together, as ``(count, numel)``: row r is what belongs to rank r of the shard axis.

    Args:
        shards: of parameters of one dtype.
        dtype: that they travel in; ``None``: as they are stored.
    """

    def __init__(self, shards: list[ParameterShard], dtype: torch.dtype | None = None) -> None:
        self.shards = shards
        self.count = shards[0].count
        self.dtype = shards[0].parameter.dtype if dtype is None or self.count == 1 else dtype
        self.numel = sum(shard.chunk_numel for shard in shards)
        self.is_offloaded = shards[0].is_offloaded

    def pack_whole(self, tensors: Iterable[Tensor | None]) -> Tensor:
        """Whole tensors, one per shard and ``None`` for zeros, as one buffer ``(count, numel)``."""
        buffer = torch.zeros(self.count, self.numel, dtype=self.dtype, device=self.shards[0].parameter.device)
        offset = 0
        for shard, tensor in zip(self.shards, tensors, strict=True):
            part = buffer[:, offset : offset + shard.chunk_numel]
            if tensor is not None and shard.is_split:
                _scatter_rows(part, tensor)
            elif tensor is not None:
                # A place of its own for each rank's: added up after the exchange, the sum has the same bits everywhere.
                part[:, shard.mesh.get_local_rank(shard.mesh.ndim - 1)] = tensor
            offset += shard.chunk_numel
        return buffer

    def pack_own(self) -> Tensor:
        """This rank's rows of all shards as one buffer ``(numel,)``."""
        buffer = torch.zeros(self.numel, dtype=self.dtype, device=self.shards[0].parameter.device)
        for shard, piece in self.pieces(buffer):
            piece.copy_(shard.optimized_part)
        return buffer

    def pieces(self, row: Tensor) -> Iterator[tuple[ParameterShard, Tensor]]:
        """Views of ``row`` (``(numel,)``, this rank's) in the shape of each shard's local part, a scalar's by rank."""
        offset = 0
        for shard in self.shards:
            shape = shard.optimized_part.shape if shard.is_split else torch.Size([shard.count])
            yield shard, row[offset : offset + shape.numel()].view(shape)
            offset += shard.chunk_numel

    @torch.no_grad()
    def unpack_whole(self, buffer: Tensor) -> None:
        """Write a buffer ``(count, numel)`` of all ranks' rows into the whole parameters."""
        offset = 0
        for shard in self.shards:
            part = buffer[:, offset : offset + shard.chunk_numel]
            if shard.is_split:
                _gather_rows(shard.parameter, part)
            else:
                shard.parameter.copy_(part[0, 0])
            offset += shard.chunk_numel


def _scatter_rows(target: Tensor, tensor: Tensor) -> None:
    """Copy ``tensor`` into ``target`` ``(count, chunk)``, chunk by chunk."""
    flat = tensor.reshape(-1)
    full, rest = divmod(flat.numel(), target.shape[1])
    target[:full].copy_(flat[: full * target.shape[1]].view(full, -1))
    if rest:
        target[full, :rest].copy_(flat[full * target.shape[1] :])


def _gather_rows(parameter: Tensor, source: Tensor) -> None:
    """Copy ``source`` ``(count, chunk)`` into ``parameter``, the reverse of :func:`_scatter_rows`."""
    flat = parameter.detach().view(-1)
    full, rest = divmod(flat.numel(), source.shape[1])
    flat[: full * source.shape[1]].view(full, -1).copy_(source[:full])
    if rest:
        flat[full * source.shape[1] :].copy_(source[full, :rest])


def make_buckets(
    shards: Iterable[ParameterShard], bucket_bytes: int, dtype: torch.dtype | None = None
) -> list[ShardBucket]:
    """Group shards, in the order given, into buckets of at most ``bucket_bytes`` (one shard at least) and one dtype.

    ``dtype`` is what they travel in, as :class:`ShardBucket` takes it.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[ParameterShard]] = defaultdict(list)
    filled: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    buckets = []
    for shard in shards:
        parameter = shard.parameter
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        if open_buckets[kind] and filled[kind] + size > bucket_bytes:
            buckets.append(ShardBucket(open_buckets.pop(kind), dtype))
            filled[kind] = 0
        open_buckets[kind].append(shard)
        filled[kind] += size
    return buckets + [ShardBucket(rest, dtype) for rest in open_buckets.values() if rest]
