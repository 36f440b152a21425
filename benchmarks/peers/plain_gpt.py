"""The ``gpt`` recipe in plain torch, without Lightning or this project.

Same model, windows of text, optimizer, schedule and clipping as the recipe. Imports no Lightning, so it also shows what
a start without it costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.windows import Windows
from trainwright.callbacks.schedule.schedules import RunSchedule
from trainwright.recipes.gpt.model import GPT, GPTConfig

Kind = Literal["single", "ddp", "zero3"]


@dataclass(frozen=True)
class PlainRun:
    """Workload.

    Args:
        config: sizes of the model.
        kind: one process, ``DistributedDataParallel``, or FSDP2 (``fully_shard`` per block and for the rest).
        micro_batch: windows per forward and rank.
        accumulation: forwards per optimizer step.
        steps: optimizer steps of the learning rate's cosine.
        device: of this rank.
        autocast: bfloat16 autocast; ``False`` is fp32.
        clip: largest norm of the gradient.
        path: text; ``None``: the standard library's source.
    """

    config: GPTConfig
    kind: Kind = "single"
    micro_batch: int = 4
    accumulation: int = 1
    steps: int = 600
    device: torch.device = torch.device("cpu")
    autocast: bool = False
    clip: float = 1.0
    path: str | None = None


class PlainTraining:
    """The training loop, a few steps at a time.

    Args:
        run: what is trained; with another kind than ``"single"`` the default process group must be there.
    """

    def __init__(self, run: PlainRun) -> None:
        self.run = run
        torch.manual_seed(0)
        whole = GPT(run.config).to(run.device)
        self.model: nn.Module = whole
        self.wrapped = self._wrap(whole)  # may take a part of it only, and say so in self.model
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.scheduler = LambdaLR(self.optimizer, RunSchedule("cosine", warmup=20, total_steps=run.steps).factor)
        self.loss = torch.zeros(())
        self._batches = self._endless()

    def train(self, steps: int) -> None:
        """Make that many optimizer steps; ``loss`` is that of the last micro-batch, still on its device."""
        accumulation = self.run.accumulation
        for _ in range(steps):
            for micro in range(accumulation):
                batch = next(self._batches).to(self.run.device, non_blocking=True)
                with self._local() if micro < accumulation - 1 else nullcontext():
                    self.loss = self._loss(batch)
                    (self.loss / accumulation).backward()
            self._clip()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def _clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)

    def _wrap(self, model: GPT) -> nn.Module:
        if self.run.kind == "ddp":
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.run.kind == "zero3":
            mesh = init_device_mesh(self.run.device.type, (dist.get_world_size(),))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def _local(self) -> AbstractContextManager[Any]:
        """Micro-batches that do not step: DDP waits with its all-reduce, FSDP2 keeps gradients sharded as always."""
        return self.wrapped.no_sync() if isinstance(self.wrapped, DistributedDataParallel) else nullcontext()

    def _loss(self, batch: Tensor) -> Tensor:
        ids = batch.long()
        with torch.autocast(self.run.device.type, torch.bfloat16, enabled=self.run.autocast):
            logits = self.wrapped(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def _sampled_ranks(self) -> tuple[int, int]:
        """Ranks that read different samples, and which of them this one is."""
        return dist.get_world_size(), dist.get_rank()

    def _endless(self) -> Iterator[Tensor]:
        data = Windows(self.run.path, self.run.config.seq_len)
        sampler: DistributedSampler[Tensor] | None = None
        if self.run.kind != "single":
            ranks, rank = self._sampled_ranks()
            sampler = DistributedSampler(data, ranks, rank, shuffle=True)
        loader = DataLoader(
            data,
            batch_size=self.run.micro_batch,
            sampler=sampler,
            shuffle=sampler is None,
            pin_memory=self.run.device.type == "cuda",
        )
        epoch = 0
        while True:
            if sampler is not None:
                sampler.set_epoch(epoch)
            yield from loader
            epoch += 1
