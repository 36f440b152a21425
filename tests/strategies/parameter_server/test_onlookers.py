from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, RichProgressBar, WeightAveraging
from torch import nn

from trainwright.callbacks.progress.throughput import Throughput
from trainwright.strategies.parameter_server.worker.onlookers import has_onlookers


class Looks(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class LooksAfterAll(Throughput):
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
    (pl.LightningModule, None, [Looks()], True),
    (pl.LightningModule, None, [LooksAfterAll()], True),
    (pl.LightningModule, None, [WeightAveraging()], True),
    (Steps, None, [], True),
    (pl.LightningModule, Moves(), [], True),
    (scripted, None, [], True),
])  # fmt: skip
def test_who_may_look_at_parameters_between_a_step_and_a_forward(module, data, callbacks, found):
    trainer = SimpleNamespace(lightning_module=module(), datamodule=data, callbacks=callbacks)
    assert has_onlookers(trainer) == found
