"""Callbacks and modules that may read parameters between a step and a forward."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, RichProgressBar, WeightAveraging
from torch import nn

from trainwright.callbacks.progress.throughput import Throughput
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.strategies.parameter_server.worker.parameter_readers import may_read_parameters, may_write_parameters


class Reading(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class ReadingThroughput(Throughput):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Steps(pl.LightningModule):
    def optimizer_step(self, *_: Any) -> None:
        pass


class Moves(pl.LightningDataModule):
    def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
        return batch


def scripted() -> pl.LightningModule:
    module = pl.LightningModule()
    module.part = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    return module


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("module", "data", "callbacks", "found"), [
    (pl.LightningModule, None, [], False),
    (pl.LightningModule, None, [LearningRateMonitor(), RichProgressBar(), Throughput()], False),
    (pl.LightningModule, None, [Reading()], True),
    (pl.LightningModule, None, [ReadingThroughput()], True),
    (pl.LightningModule, None, [WeightAveraging()], True),
    (Steps, None, [], True),
    (pl.LightningModule, Moves(), [], True),
    (scripted, None, [], True),
])  # fmt: skip
def test_may_read_parameters(module, data, callbacks, found):
    trainer = SimpleNamespace(lightning_module=module(), datamodule=data, callbacks=callbacks)
    assert may_read_parameters(trainer) == found


@pytest.mark.parametrize(("module", "callbacks", "found"), [
    (pl.LightningModule, [RunStateCheckpoint("saved"), RichProgressBar(), ReadingThroughput()], True),
    (pl.LightningModule, [RunStateCheckpoint("saved"), RichProgressBar(), Throughput()], False),
    (pl.LightningModule, [WeightAveraging()], True),
    (Steps, [], True),
])  # fmt: skip
def test_may_write_parameters(module, callbacks, found):
    trainer = SimpleNamespace(lightning_module=module(), datamodule=None, callbacks=callbacks)
    assert may_write_parameters(trainer) == found
