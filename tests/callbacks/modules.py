"""A small module, its data and a quiet Trainer for the tests of callbacks."""

import io
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.harness import QUIET, world_size


class Regression(LightningModule):
    """Two blocks and a head; keeps the loss of every micro-batch."""

    sample_unit = "pixels"
    units_per_sample = 4

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self(batch[0]) - batch[1]).pow(2).mean(), prog_bar=True, batch_size=len(batch[0]))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out: Tensor = self(batch[0])
        return out

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def loader(samples: int = 24, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=batch_size)


class Written(Logger):
    """Records one ``(step, metrics)`` per call."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "written"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def column(self, name: str) -> dict[int | None, float]:
        """Return the values of a metric by step."""
        return {step: metrics[name] for step, metrics in self.rows if name in metrics}


def train(
    *callbacks: Any,
    module: Any = None,
    data: Any = None,
    val_data: Any = None,
    kind: type[Trainer] = Trainer,
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[Any, Written]:
    """Train on the ranks of the default process group, by Lightning's own Trainer unless given.

    Returns:
        The module and what was logged.
    """
    module, written = Regression() if module is None else module, Written()
    trainer = kind(callbacks=list(callbacks), **{**QUIET, "devices": world_size(), "logger": written, **options})
    trainer.fit(module, loader() if data is None else data, val_data, ckpt_path=ckpt_path)
    return module, written


class Paper(Console):
    """A console that prints into a text, like a file or a terminal."""

    def __init__(self, width: int = 200, **options: Any) -> None:
        self._text = io.StringIO()
        super().__init__(file=self._text, width=width, **options)

    @property
    def text(self) -> str:
        return self._text.getvalue()


class Clock:
    """A manual clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now
