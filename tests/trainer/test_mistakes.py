"""Typical mistakes in Python are answered in one paragraph, with the value and what is allowed; no files stay."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainwright import Trainer, ZeroStrategy


class Net(pl.LightningModule):
    """One layer, whose step returns what a function makes of its output."""

    def __init__(self, loss: Callable[[Tensor], Any] = Tensor.mean) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 2), loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(self.layer(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(pl.LightningDataModule):
    """A data module, to be given without the parentheses."""


def trainer(**given: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1, "devices": 1}
    return Trainer(**{"accelerator": "cpu", **quiet, **given})


def loader() -> DataLoader[Tensor]:
    return DataLoader(torch.ones(8, 4), batch_size=4)


def fit(*args: Any, loss: Callable[[Tensor], Any] = Tensor.mean, **given: Any) -> Callable[[], None]:
    return lambda: trainer().fit(*(args or (Net(loss), loader())), **given)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "another strategy's argument": (lambda: ZeroStrategy(tp=2), r"TypeError: ZeroStrategy: tp=2: .*HybridStrategy"),
    "name for a number": (lambda: ZeroStrategy("zero3"), r"ValueError: ZeroStrategy: stage=zero3: .* at most 3"),
    "class for a strategy": (lambda: trainer(strategy=ZeroStrategy), r"ValueError: .*type strategy=ZeroStrategy\("),
    "text for a plugin": (lambda: trainer(plugins=["ddp"]), r"MisconfigurationException: plugins='ddp': .*Precision"),
    "text for a callback": (lambda: trainer(callbacks=["stop"]), r"TypeError: callbacks='stop': must be Callback or"),
    "class for a callback": (lambda: trainer(callbacks=ModelCheckpoint), r"type callbacks=ModelCheckpoint\(...\)"),
    "mapping of callbacks": (lambda: trainer(callbacks={"stop": 3}), r"TypeError: callbacks={'stop': 3}: must be"),
    "name of a logger": (lambda: trainer(logger="tensorboard"), r"TypeError: logger='tensorboard': must be Logger"),
    "unknown precision": (lambda: trainer(precision="fp8"), r"ValueError: precision='fp8': precisions: 16-mixed"),
    "devices in words": (lambda: trainer(devices="two"), r"TypeError: devices='two'; .* should be an int > 0"),
    "a GPU without one": (lambda: trainer(accelerator="gpu"), r"Misconf.*accelerator='gpu'.*Type accelerator='cpu'"),
    "nodes in words": (lambda: trainer(num_nodes="two"), r"ValueError: num_nodes='two': must be int"),
    "epochs in words": (lambda: trainer(max_epochs="ten"), r"TypeError: max_epochs='ten': must be int or None"),
    "negative epochs": (lambda: trainer(max_epochs=-5), r"Misconf.*max_epochs=-5; .*non-negative integer or -1"),
    "accumulating none": (lambda: trainer(accumulate_grad_batches=0), r"accumulate_grad_batches=0: must be 1 or more"),
    "negative clipping": (lambda: trainer(gradient_clip_val=-1.0), r"gradient_clip_val=-1.0: must be 0 or more"),
    "percent": (lambda: trainer(limit_val_batches="10%"), r"limit_val_batches='10%': must be int or float or None"),
    "misspelled loader": (fit(Net(), train_dataloader=[]), r"train_dataloader=\[\]: .*type train_dataloaders=\[\]"),
    "epochs of fit": (fit(Net(), epochs=3), r"TypeError: Trainer.fit: epochs=3: there is no such argument; arguments"),
    "class for a module": (fit(Net, loader()), r"TypeError: model=Net: must be LightningModule; type model=Net\(...\)"),
    "swapped": (fit(loader(), Net()), r"TypeError: `model` must be a `LightningModule` .*, got `DataLoader`"),
    "class for a data module": (fit(Net(), datamodule=Data), r"TypeError: datamodule=Data: .*type datamodule=Data\("),
    "number for a path": (fit(Net(), [], ckpt_path=True), r"TypeError: ckpt_path=True: must be str or Path or None"),
    "no such checkpoint": (fit(Net(), loader(), ckpt_path="no.ckpt"), r"MissingCheckpoint: .*no.ckpt. Give the path"),
    "no loader": (fit(Net()), r"MisconfigurationException: `train_dataloader` must be implemented"),
    "number for a loss": (fit(loss=lambda x: x.mean().item()), r"Misconf.*training_step returned -?\d.*: .* a Tensor"),
    "no loss in a dict": (fit(loss=lambda x: {"l": x}), r"Misconf.*training_step returned {'l': .*'loss' key needs"),
    "detached loss": (fit(loss=lambda x: x.mean().detach()), r"RuntimeError: .* one number .*requires_grad=False"),
    "loss of many numbers": (fit(loss=lambda x: x), r"RuntimeError: .* one number .* tensor of shape \(4, 2\)"),
}  # fmt: skip


@pytest.mark.parametrize(("mistake", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_answered_at_once(mistake: Callable[[], Any], answer: str) -> None:
    began = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the table has the kind
        mistake()
    assert re.search(answer, f"{type(caught.value).__name__}: {caught.value}")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 10
    assert not list(Path().iterdir())


def test_trainer_logs_after_a_failed_run() -> None:
    """The folder that went with the failed run is made again."""
    used = trainer(logger=CSVLogger(".", "logs"), callbacks=[EarlyStopping("loss")], log_every_n_steps=1)
    with pytest.raises(RuntimeError, match="one number"):
        used.fit(Net(lambda x: x), loader())
    assert not list(Path().iterdir())
    with pytest.raises(RuntimeError, match="metric `loss` which is not available"):
        used.fit(Net(), loader())
    assert Path("logs/version_0").is_dir()  # batches were trained


@pytest.mark.parametrize("given", [
    {"max_steps": 1e3}, {"sync_batchnorm": 0}, {"sync_batchnorm": None}, {"limit_val_batches": 1}, {"logger": []},
    {"num_sanity_val_steps": False}, {"callbacks": (EarlyStopping("loss"),)}, {"max_time": {"hours": 1}},
])  # fmt: skip
def test_other_forms_of_a_value_stay_allowed(given: dict[str, Any]) -> None:
    trainer(**given)
