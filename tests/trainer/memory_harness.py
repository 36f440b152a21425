"""A small model with blocks, dropout and running statistics, for tests of in-memory states under any layout."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from tests.parity.harness import QUIET, world_size
from trainwright import DealtStream, ShardedStream, Trainer
from trainwright.checkpoint.memory.snapshots import Snapshot, Snapshots
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.data.streams.sources import IndexedShards

WIDTH = 8
# Strategy, its options, number of ranks.
PLACES: dict[str, tuple[str, dict[str, Any], int]] = {
    "single": ("single", {}, 1),
    "ddp": ("ddp", {}, 2),
    "zero2": ("zero2", {}, 2),
    "zero3": ("zero3", {}, 2),
    "pipeline": ("pipeline", {"pipeline": 2, "shard": 1}, 2),
    "pipeline x shard": ("hybrid", {"pipeline": 2, "shard": 2}, 4),
}


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """``samples`` fixed random vectors and their targets, each with its index."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(samples, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.x[index].sum().sin().reshape(1)


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.inner(x)))


class Model(pl.LightningModule):
    """Records its training samples in order; logs its loss.

    Args:
        dropout: of its blocks.
        statistics: with running statistics (a buffer that differs between data ranks).
    """

    def __init__(self, dropout: float = 0.1, statistics: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if statistics else nn.Identity()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.seen: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        index, x, y = batch
        self.seen.append(index.tolist())
        loss = (self(x) - y).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self(batch[1]) - batch[2]).square().mean(), batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Losses(pl.Callback):
    """The last exact loss of every optimizer step, and the whole parameters at the end."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.parameters: dict[str, Tensor] = {}
        self.hooks: list[str] = []
        self._micro: list[Tensor] = []
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.hooks.append("train start")
        self._step = trainer.global_step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.hooks.append(f"epoch {trainer.current_epoch} start")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.hooks.append(f"epoch {trainer.current_epoch} end")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._step = trainer.global_step
            self._micro = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._micro.append(outputs["loss"].detach().float())
        if trainer.global_step == self._step:
            return
        loss = torch.stack(self._micro).sum()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self.losses[trainer.global_step] = loss.item()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.parameters = dict(trainer.strategy.whole_parameters())


class Hold(pl.Callback):
    """Copies this rank's state after the given optimizer steps."""

    def __init__(self, *steps: int) -> None:
        self._steps, self._seen = steps, 0
        self.snapshots = Snapshots(keep=max(len(steps), 1))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step = trainer.global_step
        if step in self._steps and step != self._seen:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            self.snapshots.take(trainer.strategy.run_state(checkpoint, complete=True), step)
        self._seen = step


def make_trainer(place: str, callbacks: Sequence[Any], max_steps: int = 8, **options: Any) -> Trainer:
    """Return a quiet Trainer on the ranks of the default process group."""
    strategy, given, _ = PLACES[place]
    return Trainer(
        strategy=make_strategy(strategy, **{"certificate": "off", **given}),
        devices=world_size(),
        callbacks=list(callbacks),
        **{**QUIET, "global_batch_size": 12, "data_seed": 3, "max_steps": max_steps, "max_epochs": -1, **options},
    )


class Stateful(IterableDataset[Any]):
    """Saves its own position."""

    def __init__(self, data: Numbered) -> None:
        self.data, self.next = data, 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < len(self.data):
            self.next += 1
            yield self.data[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class InPairs(BatchSampler):
    """A custom batch sampler."""


def make_loader(samples: int = 60, batch_size: int = 2, kind: str = "map", **options: Any) -> DataLoader[Any]:
    """Return a loader; with 12 samples per optimizer step, 60 make epochs of 5 steps.

    Args:
        samples, batch_size: of the data.
        kind: ``"map"`` (shuffled), ``"stream"``, ``"shards"``, ``"stateful"`` or ``"batches"`` (a batch sampler of its
            own).
        **options: of the loader.
    """
    data = Numbered(samples)
    if kind == "batches":
        return DataLoader(data, batch_sampler=InPairs(RandomSampler(data), batch_size, drop_last=False), **options)
    if kind == "map":
        return DataLoader(data, batch_size=batch_size, shuffle=True, **options)
    if kind == "shards":
        stream: Any = ShardedStream(IndexedShards(data, [samples - 4, 4]), buffer=16, shards_at_once=2)
    else:
        stream = DealtStream([data[index] for index in range(samples)]) if kind == "stream" else Stateful(data)
    return DataLoader(stream, batch_size=batch_size, **options)


def fit(
    place: str,
    callbacks: Sequence[Any] = (),
    module: Model | None = None,
    held: Snapshot | str | None = None,
    loader: DataLoader[Any] | None = None,
    **options: Any,
) -> tuple[Losses, Model]:
    """Train; return the recorder and the module."""
    torch.manual_seed(7)
    recorder, module = Losses(), Model() if module is None else module
    trainer = make_trainer(place, [*callbacks, recorder], **options)
    val_loader = DataLoader(Numbered(8), batch_size=4) if "limit_val_batches" in options else None
    trainer.fit(module, make_loader() if loader is None else loader, val_loader, ckpt_path=held)
    return recorder, module


def meet_anew(folder: str, members: Sequence[int], rank: int) -> bool:
    """Form a default group of some of the ranks, in order; return whether this rank is one of them."""
    dist.destroy_process_group()
    if rank not in members:
        return False
    place, size = members.index(rank), len(members)
    os.environ.update(RANK=str(place), LOCAL_RANK=str(place), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=place, world_size=size)
    return True
