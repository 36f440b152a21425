"""Preempted runs, and runs that resume from their checkpoints."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.harness import make_trainer, world_size
from tests.parity.modules import Tokens, make_module
from tests.parity.test_resume_watched import BATCH, SAMPLES, Net, Points
from trainwright import RunStateCheckpoint
from trainwright.callbacks.end.preemption import Preempted, Preemption

MODULE = "decoder-adamw"


class Parameters(pl.Callback):
    """Holds the whole parameters of the end."""

    def __init__(self) -> None:
        self.whole: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.whole = {name: value.clone() for name, value in trainer.strategy.whole_parameters()}


class Told(pl.Callback):
    """One rank gets a signal at the n-th call of a hook.

    Args:
        hook: name of the hook.
        call: which of its calls, counted from 1.
        rank: who gets the signal.
        number: of the signal.
    """

    def __init__(self, hook: str, call: int = 1, rank: int = 0, number: int = signal.SIGTERM) -> None:
        self.left, self.rank, self.number = call, rank, number
        setattr(self, hook, self.tell)

    def tell(self, trainer: pl.Trainer, *_: Any) -> None:
        self.left -= 1
        if self.left == 0 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)


def watched(folder: Path, callbacks: list[Any], resume: str | None, seed: int, **options: Any) -> tuple[Net, Any]:
    """Run one process with a recording module; return the module and its `Preempted` or `None`."""
    torch.manual_seed(seed)
    module, ended = Net("plateau epoch val"), None
    trainer = make_trainer(
        "single",
        callbacks=[*callbacks, RunStateCheckpoint(str(folder), every=None, save_at_end=True)],
        enable_checkpointing=True,
        **{"max_steps": 15, "max_epochs": -1, "data_seed": 3, **options},
    )
    train = DataLoader(Points(SAMPLES, 0), batch_size=BATCH, shuffle=True)
    try:
        trainer.fit(module, train, DataLoader(Points(12, 1), batch_size=4), ckpt_path=resume)
    except Preempted as preempted:
        ended = preempted
    return module, ended


def parameters_of(
    strategy: str, options: dict[str, Any], folder: Path, told: tuple[Any, ...] | None, resume: str | None
) -> dict[str, Any]:
    """Run on the ranks of the pool; return how it ended, with the whole parameters if it was not preempted."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the pool's own would run as well
    torch.manual_seed(1)
    parameters = Parameters()
    trainer = make_trainer(
        strategy,
        options,
        global_batch_size=12,
        max_steps=8,
        max_epochs=-1,
        callbacks=[
            parameters,
            RunStateCheckpoint(str(folder), every=None),
            Preemption(check_seconds=1e-6),  # so that the ranks agree after each micro-batch
            *([] if told is None else [Told(*told)]),
        ],
        enable_checkpointing=True,
    )
    data_ranks = trainer.strategy.layout.resolve(world_size()).data_ranks if options else world_size()
    module, ended = make_module(MODULE), None
    try:
        trainer.fit(module, DataLoader(Tokens(), batch_size=12 // data_ranks), ckpt_path=resume)
    except Preempted as preempted:
        ended = preempted
    return {
        "step": trainer.global_step,
        "code": None if ended is None else ended.code,
        "checkpoint": None if ended is None else ended.checkpoint,
        "parameters": parameters.whole,
    }


def trainer_of(callbacks: list[Any], **options: Any) -> tuple[Any, Net]:
    """A Trainer of one process, and a module for it."""
    saves = any(isinstance(each, RunStateCheckpoint) for each in callbacks)
    options = {"max_steps": 8, "max_epochs": -1, **options}
    return make_trainer("single", callbacks=callbacks, enable_checkpointing=saves, **options), Net()


def points() -> DataLoader[Any]:
    """Its data."""
    return DataLoader(Points(SAMPLES, 0), batch_size=BATCH)


class Evaluated(Net):
    """Counts the batches of any evaluation."""

    batches = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    test_step = predict_step = validation_step


def evaluate(verb: str, folder: Path) -> dict[str, Any]:
    """Evaluate with a preemption of the last rank in its third batch."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    hook = {"sanity check": "validation", "validate": "validation"}.get(verb, verb)
    callbacks = [
        Told(f"on_{hook}_batch_end", 3, rank=world_size() - 1),
        Preemption(check_seconds=1e-6),
        RunStateCheckpoint(str(folder)),
    ]
    options = {"num_sanity_val_steps": -1} if verb == "sanity check" else {}
    trainer = make_trainer(
        "single" if world_size() == 1 else "ddp", callbacks=callbacks, enable_checkpointing=True, max_steps=3, **options
    )
    module, data, code = Evaluated(), DataLoader(Points(24, 1), batch_size=1), None
    try:
        if verb == "sanity check":
            trainer.fit(module, data, data)
        else:
            getattr(trainer, verb)(module, data)
    except Preempted as ended:
        code = ended.code
    return {"code": code, "batches": module.batches}


class Late(pl.Callback):
    """Lets the first rank be slow, and holds the samples that this rank trains on."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.read += batch[0].int().tolist()
        if trainer.global_rank == 0:
            time.sleep(0.02)


class Weight(pl.LightningModule):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight * batch[0].mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def alone(options: dict[str, Any], folder: Path, told: tuple[Any, ...] | None, resume: str | None) -> dict[str, Any]:
    """Workers of parameter servers that step by themselves through one epoch of 40 steps each."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    late = Late()
    trainer = make_trainer(
        "parameter_server",
        options,
        max_epochs=1,
        callbacks=[late, RunStateCheckpoint(str(folder), every=None), *([] if told is None else [Told(*told)])],
        enable_checkpointing=True,
    )
    module, ended = Weight(), None
    data = TensorDataset(torch.arange(80.0 * world_size()))
    try:
        trainer.fit(module, DataLoader(data, batch_size=2), ckpt_path=resume)
    except Preempted as preempted:
        ended = preempted
    return {
        "step": trainer.global_step,
        "code": None if ended is None else ended.code,
        "reason": None if ended is None else ended.told.reason,
        "checkpoint": None if ended is None else ended.checkpoint,
        "read": late.read,
    }
