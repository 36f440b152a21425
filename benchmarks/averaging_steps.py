"""Steps of a wide model under DDP, timed; a module of its own because the averages need no Lightning."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.quiet import PLAIN_TRAINER, silence_lightning
from trainwright.strategies.contract.communication.options import HIERARCHICAL
from trainwright.strategies.data.ddp import DDPStrategy
from trainwright.trainer.trainer import Trainer

_WIDTH = 1024
_UNTIMED_STEPS = 2


class _Wide(pl.LightningModule):
    """Square matrices of 4 MiB each, and little to compute."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Times(pl.Callback):
    """When steps ended, in seconds."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def time_step(way: str, nodes: int, per_node: int, layers: int, steps: int) -> float:
    """Seconds of a step under DDP on this rank, the median.

    Args:
        way: of ``average_by``.
        nodes: how many.
        per_node: ranks of each.
        layers: of 4 MiB.
        steps: that are timed.
    """
    silence_lightning()
    times = _Times()
    strategy = DDPStrategy(average_by=way, **({"ranks_per_node": per_node} if way == HIERARCHICAL else {}))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=per_node,
        num_nodes=nodes,
        max_steps=_UNTIMED_STEPS + steps,
        callbacks=[times],
        **PLAIN_TRAINER,
    )
    rows = TensorDataset(torch.randn(8 * dist.get_world_size() * (_UNTIMED_STEPS + steps), _WIDTH))
    trainer.fit(_Wide(layers), DataLoader(rows, batch_size=8))
    ends = times.ends[_UNTIMED_STEPS - 1 :]
    return median(after - before for before, after in zip(ends, ends[1:], strict=False))
