"""Preempted runs, and runs that resume from their checkpoints."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
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
    """Records the whole parameters at the end."""

    def __init__(self) -> None:
        self.whole: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.whole = {name: value.clone() for name, value in trainer.strategy.whole_parameters()}


class SendSignal(pl.Callback):
    """Sends a signal to one rank at the n-th call of a hook.

    Args:
        hook: name of the hook.
        call: which of its calls, counted from 1.
        rank: receiver.
        number: of the signal.
    """

    def __init__(self, hook: str, call: int = 1, rank: int = 0, number: int = signal.SIGTERM) -> None:
        self.left, self.rank, self.number = call, rank, number
        setattr(self, hook, self.send)

    def send(self, trainer: pl.Trainer, *_: Any) -> None:
        self.left -= 1
        if self.left == 0 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)


def preemption_of(train: Callable[[], Any]) -> Preempted | None:
    """Return the preemption that ended a run, if one did."""
    try:
        train()
    except Preempted as ended:
        return ended
    return None


def facts_of(ended: Preempted | None) -> dict[str, Any]:
    """Return what a rank reports of a preemption; values are ``None`` without one."""
    if ended is None:
        return dict.fromkeys(("code", "reason", "checkpoint"))
    return {"code": ended.code, "reason": ended.told.reason, "checkpoint": ended.checkpoint}


def watched(folder: Path, callbacks: list[Any], resume: str | None, seed: int, **options: Any) -> tuple[Net, Any]:
    """Run one process with a recording module; return the module and its `Preempted` or `None`."""
    torch.manual_seed(seed)
    module = Net("plateau epoch val")
    trainer = make_trainer(
        "single",
        callbacks=[*callbacks, RunStateCheckpoint(str(folder), every=None, save_at_end=True)],
        enable_checkpointing=True,
        **{"max_steps": 15, "max_epochs": -1, "data_seed": 3, **options},
    )
    train = DataLoader(Points(SAMPLES, 0), batch_size=BATCH, shuffle=True)
    val = DataLoader(Points(12, 1), batch_size=4)
    return module, preemption_of(lambda: trainer.fit(module, train, val, ckpt_path=resume))


def parameters_of(
    strategy: str, options: dict[str, Any], folder: Path, signal_at: tuple[Any, ...] | None, resume: str | None
) -> dict[str, Any]:
    """Run on the ranks of the pool; return how it ended, with the whole parameters if it was not preempted."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the pool's own would run as well
    torch.manual_seed(1)
    parameters = Parameters()
    sent = [] if signal_at is None else [SendSignal(*signal_at)]
    # The ranks agree after each micro-batch.
    callbacks = [parameters, RunStateCheckpoint(str(folder), every=None), Preemption(check_seconds=1e-6), *sent]
    limits = {"global_batch_size": 12, "max_steps": 8, "max_epochs": -1}
    trainer = make_trainer(strategy, options, callbacks=callbacks, enable_checkpointing=True, **limits)
    data_ranks = trainer.strategy.layout.resolve(world_size()).data_ranks if options else world_size()
    module, data = make_module(MODULE), DataLoader(Tokens(), batch_size=12 // data_ranks)
    ended = preemption_of(lambda: trainer.fit(module, data, ckpt_path=resume))
    return {"step": trainer.global_step, **facts_of(ended), "parameters": parameters.whole}


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
        SendSignal(f"on_{hook}_batch_end", 3, rank=world_size() - 1),
        Preemption(check_seconds=1e-6),
        RunStateCheckpoint(str(folder)),
    ]
    options = {"num_sanity_val_steps": -1} if verb == "sanity check" else {}
    trainer = make_trainer(
        "single" if world_size() == 1 else "ddp", callbacks=callbacks, enable_checkpointing=True, max_steps=3, **options
    )
    module, data = Evaluated(), DataLoader(Points(24, 1), batch_size=1)
    given = (module, data, data) if verb == "sanity check" else (module, data)
    ended = preemption_of(lambda: getattr(trainer, "fit" if verb == "sanity check" else verb)(*given))
    return {**facts_of(ended), "batches": module.batches}


class SlowFirstRank(pl.Callback):
    """Slows the first rank down and records the samples of this rank."""

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


def train_asynchronously(
    options: dict[str, Any], folder: Path, signal_at: tuple[Any, ...] | None, resume: str | None
) -> dict[str, Any]:
    """Train asynchronous workers of parameter servers for one epoch of 40 steps each."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    recorder = SlowFirstRank()
    sent = [] if signal_at is None else [SendSignal(*signal_at)]
    callbacks = [recorder, RunStateCheckpoint(str(folder), every=None), *sent]
    trainer = make_trainer("parameter_server", options, max_epochs=1, callbacks=callbacks, enable_checkpointing=True)
    data = DataLoader(TensorDataset(torch.arange(80.0 * world_size())), batch_size=2)
    ended = preemption_of(lambda: trainer.fit(Weight(), data, ckpt_path=resume))
    return {"step": trainer.global_step, **facts_of(ended), "read": recorder.read}
