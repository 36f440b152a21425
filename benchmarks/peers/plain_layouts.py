"""The ``gpt`` recipe over stages of a pipeline, and over FSDP2 times tensor ranks, written by hand in plain torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import get_total_norm

from benchmarks.peers.plain_gpt import PlainRun, PlainTraining
from trainwright.recipes.gpt.model import GPT, rotary_angles


class Stage(nn.Module):
    """Some blocks of a :class:`GPT`; the first has the embedding, the last the norm and the head.

    Args:
        model: whole.
        index: of the stage.
        count: number of stages, at least 2 and a divisor of the number of blocks.
    """

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        self.config = model.config
        size = len(model.blocks) // count
        self.blocks = nn.ModuleList(model.blocks[index * size + i] for i in range(size))
        self.is_first, self.is_last = index == 0, index == count - 1
        self.embedding = model.embedding if self.is_first or (self.is_last and model.head is None) else None
        self.norm = model.norm if self.is_last else None
        self.head = model.head if self.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Ids ``(B, T)`` or hidden ``(B, T, D)`` to hidden or logits ``(B, T, V)``."""
        angles = rotary_angles(x.size(1), self.config.head_dim, self.config.rope_base, x.device)
        if self.is_first:
            assert self.embedding is not None
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, *angles)
        if not self.is_last:
            return x
        assert self.norm is not None
        x = self.norm(x)
        if self.head is not None:
            return self.head(x)  # type: ignore[no-any-return]
        assert self.embedding is not None
        return F.linear(x, self.embedding.weight)


class PipelineByHand(PlainTraining):
    """``Schedule1F1B`` over all ranks.

    Args:
        run: what is trained; ``micro_batch`` is the batch of a step.
        micro_batches: parts of it.
    """

    def __init__(self, run: PlainRun, micro_batches: int) -> None:
        self._count = micro_batches
        super().__init__(run)

    def _wrap(self, model: GPT) -> nn.Module:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        stage = Stage(model, rank, ranks)
        self.model = stage
        self._tied = stage.embedding.weight if stage.embedding is not None and model.head is None else None
        self._ends = dist.new_group([0, ranks - 1])
        self._schedule = Schedule1F1B(
            PipelineStage(stage, rank, ranks, self.run.device), self._count, loss_fn=_loss_of, scale_grads=True
        )
        return stage

    def train(self, steps: int) -> None:
        """Make that many optimizer steps."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for _ in range(steps):
            ids = next(self._batches).to(self.run.device, non_blocking=True).long()
            losses: list[Tensor] = []
            if rank == 0:
                self._schedule.step(ids[:, :-1].contiguous(), return_outputs=False)
            elif rank == ranks - 1:
                self._schedule.step(target=ids[:, 1:].contiguous(), losses=losses, return_outputs=False)
                self.loss = torch.stack(losses).mean().detach()
            else:
                self._schedule.step()
            if self._tied is not None:
                dist.all_reduce(self._tied.grad, group=self._ends)
            self._clip()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def _clip(self) -> None:
        ranks = dist.get_world_size()
        mine = [p for p in self.model.parameters() if not (p is self._tied and dist.get_rank() == ranks - 1)]
        square = get_total_norm([p.grad for p in mine if p.grad is not None]) ** 2
        dist.all_reduce(square)
        _scale_to(self.run.clip, square.sqrt(), self.model.parameters())

    def _sampled_ranks(self) -> tuple[int, int]:
        return 1, 0  # all stages read the same samples


class ShardedTensorByHand(PlainTraining):
    """``parallelize_module`` over pairs of ranks, ``fully_shard`` over the others.

    Args:
        run: what is trained; ``micro_batch`` is per data rank.
        tensor: ranks that split each weight.
    """

    def __init__(self, run: PlainRun, tensor: int = 2) -> None:
        self._tensor = tensor
        super().__init__(run)

    def _wrap(self, model: GPT) -> nn.Module:
        shape = (dist.get_world_size() // self._tensor, self._tensor)
        self._mesh = mesh = init_device_mesh(self.run.device.type, shape, mesh_dim_names=("shard", "tensor"))
        plan: Any = {
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
            **{name: RowwiseParallel() for name in ("attention.out", "feed_forward.down")},
        }
        blocks: Any = model.blocks
        for block in blocks:
            parallelize_module(block, mesh["tensor"], plan)
            block.attention.heads //= self._tensor
            block.attention.kv_heads //= self._tensor
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        return model

    def _clip(self) -> None:
        by_mesh: dict[DeviceMesh, list[Tensor]] = {}
        for parameter in self.model.parameters():
            if isinstance(parameter.grad, DTensor):
                by_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter.grad)
        norms = [get_total_norm(gradients) for gradients in by_mesh.values()]
        squares = [(norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2 for norm in norms]
        _scale_to(self.run.clip, torch.stack(squares).sum().sqrt(), self.model.parameters())

    def _sampled_ranks(self) -> tuple[int, int]:
        return self._mesh.size(0), self._mesh.get_local_rank("shard")


def _loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def _scale_to(limit: float, norm: Tensor, parameters: Iterable[nn.Parameter]) -> None:
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)
