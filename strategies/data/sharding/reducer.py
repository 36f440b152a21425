"""Reduction of gradients into the shards that own them, overlapped with backward.

Per bucket, in the order in which backward produces gradients:

1. when all gradients of the bucket are there: pack and free them,
2. reduce-scatter over the shard axis (asynchronous),
3. after backward: wait, all-reduce over the replicate axis, add to the optimizer's gradients.

Traffic per step, including the all-gather of parameters: 2 x parameters, as in the ZeRO paper (arXiv:1910.02054,
section 7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.collectives.flat import all_gather, reduce_scatter
from trainwright.strategies.state.shards import ParameterShard, ShardBucket, make_buckets

# Buckets in flight: enough to overlap, few enough to bound extra memory.
_IN_FLIGHT = 2


class GradientReducer:
    """Hooks on parameters that turn their gradients into averaged shards.

    After backward each parameter's ``grad`` is the averaged shard (a DTensor) that the optimizer sees, so ``zero_grad``
    of any module works as usual.

    Args:
        shards: parameters in module order.
        mesh: axes ``(replicate, shard)`` or ``(shard,)``.
        bucket_bytes: upper bound of a bucket in bytes.
        find_unused: agree on which parameters got a gradient on any rank before reducing (one more collective per
            backward, no overlap). Off: a parameter without a gradient must have none on every rank.
        average_replicas: average over the replicate axis; ``False``: done elsewhere.
        dtype: of the sum over the shard axis; ``None``: that of the gradients.
    """

    def __init__(
        self,
        shards: Iterable[ParameterShard],
        mesh: DeviceMesh,
        bucket_bytes: int,
        find_unused: bool = False,
        average_replicas: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        ordered = [shard for shard in shards if shard.parameter.requires_grad]
        ordered.reverse()  # backward reaches the last parameters first
        self._buckets = make_buckets(ordered, bucket_bytes, dtype)
        self._bucket_of = {shard: i for i, bucket in enumerate(self._buckets) for shard in bucket.shards}
        self._shard_group = mesh.get_group(mesh.ndim - 1)
        self._replicate_group = mesh.get_group(0) if mesh.ndim > 1 and mesh.size(0) > 1 else None
        self._find_unused = find_unused
        self._sync_shards = True
        self._sync_replicas = average_replicas
        self._has_room = False
        self._reset()
        self._handles = [
            handle
            for shard in ordered
            for handle in (
                shard.parameter.register_hook(partial(self._before_gradient, shard)),
                shard.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, shard)),
            )
        ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def accumulate(self, shards_too: bool) -> AbstractContextManager[None]:
        """Defer averaging in backward passes inside.

        Args:
            shards_too: ``True`` keeps whole local gradients and communicates nothing; ``False`` reduces into shards, so
                that no whole gradient stays, and skips the replicate axis only.
        """
        return with_attributes(self, _sync_replicas=False, _sync_shards=self._sync_shards and not shards_too)

    def begin(self) -> None:
        """Make room for whole gradients of several backward passes, in which hooks need not run."""
        for bucket in self._buckets:
            for shard in bucket.shards:
                self._make_room(shard)
        self._has_room = True

    def finish(self) -> None:
        """Average the gradients accumulated since :meth:`begin`."""
        self._has_room = False
        if self._sync_shards:
            self._finish()

    def _reset(self) -> None:
        self._waiting = [len(bucket.shards) for bucket in self._buckets]
        self._next = 0
        self._launched: deque[tuple[ShardBucket, Tensor, list[bool], Any]] = deque()
        self._touched: set[ParameterShard] = set()
        self._queued = False

    def _before_gradient(self, shard: ParameterShard, _: Tensor) -> None:
        if not self._has_room:
            self._make_room(shard)

    @staticmethod
    def _make_room(shard: ParameterShard) -> None:
        """Remove the averaged shard of an earlier backward, to make room for a whole gradient."""
        parameter = shard.parameter
        if isinstance(parameter.grad, DTensor):
            parameter.grad = None  # still held by the optimizer, unless it was zeroed there
        elif parameter.grad is None:
            shard.forget_zeroed()

    def _on_gradient(self, shard: ParameterShard, _: nn.Parameter) -> None:
        if not shard.optimized.requires_grad:
            # A toggled-off optimizer's parameters take part in the graph but must not learn from this loss.
            shard.parameter.grad = None
        if not self._sync_shards:
            return
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._finish)
        self._waiting[self._bucket_of[shard]] -= 1
        while not self._find_unused and self._next < len(self._buckets) and self._waiting[self._next] <= 0:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        used = [shard.whole_gradient is not None for shard in bucket.shards]
        if not any(used):
            return
        while len(self._launched) >= _IN_FLIGHT:
            self._land()
        self._launch(bucket, bucket.pack_whole(_pop_gradient(shard) for shard in bucket.shards), used)

    def _launch(self, bucket: ShardBucket, packed: Tensor, used: list[bool]) -> None:
        if bucket.count == 1:
            self._launched.append((bucket, packed[0], used, None))
            return
        row = packed.new_empty(bucket.numel)
        flat = packed.view(-1)  # gloo compares dim 0 of both sides
        work = reduce_scatter(row, flat, op=dist.ReduceOp.AVG, group=self._shard_group, async_op=True)
        # gloo's threads use these objects: keep them alive until the work is done.
        self._launched.append((bucket, row, used, (work, packed, flat)))

    def _land(self) -> None:
        bucket, row, used, pending = self._launched.popleft()
        if pending is not None:
            pending[0].wait()
        for (shard, piece), is_used in zip(bucket.pieces(row), used, strict=True):
            if is_used:
                shard.add_gradient(piece)
                self._touched.add(shard)

    def _finish(self) -> None:
        if self._find_unused:
            self._fill_unused()
        while self._next < len(self._buckets):
            self._launch_next()
        while self._launched:
            self._land()
        for bucket in self._buckets:
            for shard in bucket.shards:
                shard.forget_zeroed() if shard not in self._touched else shard.show_gradient()
        if self._replicate_group is not None and self._sync_replicas:
            self._average_replicas()
        self._reset()

    def _fill_unused(self) -> None:
        """Set zero gradients for parameters that got a gradient on another rank only."""
        shards = [shard for bucket in self._buckets for shard in bucket.shards]
        flags = torch.tensor([float(shard.whole_gradient is not None) for shard in shards])
        flags = flags.to(shards[0].parameter.device)
        for group in (self._shard_group, self._replicate_group):
            if group is not None:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        for shard, flag in zip(shards, flags.tolist(), strict=True):
            if flag and shard.whole_gradient is None:
                shard.parameter.grad = torch.zeros_like(shard.parameter)

    def _average_replicas(self) -> None:
        # All shards with a gradient, not only those of this backward: earlier micro-batches skipped the replicate axis.
        shards = [s for bucket in self._buckets for s in bucket.shards if s.optimized.grad is not None]
        for bucket in make_buckets(shards, bucket_bytes=1 << 25):
            parts = [shard.optimized.grad._local_tensor for shard in bucket.shards]  # type: ignore[union-attr]
            flat = torch.cat([part.reshape(-1) for part in parts]).to(bucket.shards[0].parameter.device)
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self._replicate_group)
            for part, piece in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(piece.view(part.shape))


def _pop_gradient(shard: ParameterShard) -> Tensor | None:
    """Return the gradient of a parameter and clear it."""
    gradient = shard.whole_gradient
    if gradient is not None:
        if gradient.is_sparse:
            raise ValueError(
                f"A parameter of shape {tuple(gradient.shape)} got a sparse gradient, but ZeRO splits dense gradients "
                "only. Type sparse=False where the module creates its embedding."
            )
        shard.parameter.grad = None
    return gradient


class ParameterPublisher:
    """All-gathers stepped rows.

    Args:
        shards: by parameter.
        mesh: axes ``(replicate, shard)`` or ``(shard,)``.
        bucket_bytes: upper bound of a bucket in bytes.
    """

    def __init__(self, shards: Mapping[nn.Parameter, ParameterShard], mesh: DeviceMesh, bucket_bytes: int) -> None:
        self._by_optimized = {id(shard.optimized): shard for shard in shards.values()}
        self._group = mesh.get_group(mesh.ndim - 1)
        self._bucket_bytes = bucket_bytes
        # Optimizer and its number of parameters, since hooks may add groups.
        self._buckets: dict[tuple[int, int], list[ShardBucket]] = {}

    def publish(self, optimizer: torch.optim.Optimizer) -> None:
        """All-gather what ``optimizer`` stepped into the whole parameters of every rank, bucket by bucket."""
        key = id(optimizer), sum(len(group["params"]) for group in optimizer.param_groups)
        if key not in self._buckets:
            held = [self._by_optimized.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
            self._buckets[key] = make_buckets([s for s in held if s is not None], self._bucket_bytes)
        flying: deque[tuple[ShardBucket, Tensor, Any]] = deque()  # keeps the objects that gloo's threads use
        for bucket in self._buckets[key]:
            while len(flying) >= _IN_FLIGHT:
                self._land(*flying.popleft())
            if bucket.count == 1 and not bucket.is_offloaded:
                continue  # the optimizer stepped whole parameters
            own = bucket.pack_own()
            if bucket.count == 1:
                bucket.unpack_whole(own[None])
                continue
            whole = own.new_empty(bucket.count, bucket.numel)
            flat = whole.view(-1)
            work = all_gather(flat, own, group=self._group, async_op=True)
            flying.append((bucket, whole, (work, flat, own)))
        while flying:
            self._land(*flying.popleft())

    @staticmethod
    def _land(bucket: ShardBucket, whole: Tensor, pending: Any) -> None:
        pending[0].wait()
        bucket.unpack_whole(whole)
