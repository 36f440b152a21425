"""The ``wide_deep`` recipe: embeddings of categorical columns and a network of dense layers predict clicks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from trainwright.recipes.tables.click_log import COLUMNS, DENSE_COLUMNS, ClickLog, crossed, draw_click_log, hashed


class WideDeep(LightningModule):
    """Wide & deep learning (Cheng et al. 2016, arXiv:1606.07792): a linear model that remembers pairs of values, and a
    network that generalises from embeddings of single ones; their logits are added.

    The names of all tables begin with ``embedding.``: ``embedding.wide`` has a weight for each hashed value and pair of
    values, ``embedding.deep.<column>`` a vector for each hashed value.

    Logs ``train_loss``, and over all impressions of a split ``val_loss`` and ``test_loss`` (log loss, nats). If the
    data module knows how good a model can be, it logs ``val_excess`` and ``test_excess`` too: the loss over that of the
    true probabilities. ``predict`` returns the probability of a click.

    Args:
        columns: names of the categorical columns, in the order of the data.
        dense: number of dense columns.
        crosses: pairs of columns that the wide part knows.
        rows: rows of each deep table, into which values are hashed.
        wide_rows: rows of the wide table, into which values and pairs are hashed.
        dim: numbers of an embedding.
        hidden: widths of the dense layers.
        sparse: give the tables sparse gradients, which hold the rows that a batch has touched; asks for an optimizer
            that takes them beside dense ones (Adagrad, or SGD without weight decay). ``False`` (off): dense gradients.
        optimizer: takes parameters, returns the optimizer; ``None``: Adagrad with learning rate 0.05.
    """

    def __init__(
        self,
        columns: Sequence[str] = tuple(COLUMNS),
        dense: int = DENSE_COLUMNS,
        crosses: Sequence[Sequence[str]] = (("site", "device"), ("item", "device")),
        rows: int = 8192,
        wide_rows: int = 32768,
        dim: int = 16,
        hidden: Sequence[int] = (64, 32),
        sparse: bool = False,
        optimizer: Callable[[Any], Optimizer] | None = None,
    ) -> None:
        super().__init__()
        self.columns = tuple(columns)
        self.crosses = tuple(self._places(pair) for pair in crosses)
        self.optimizer_factory = optimizer or partial(Adagrad, lr=0.05)
        self.embedding = nn.ModuleDict(
            {
                "wide": nn.Embedding(wide_rows, 1, sparse=sparse),
                "deep": nn.ModuleDict({name: nn.Embedding(rows, dim, sparse=sparse) for name in self.columns}),
            }
        )
        widths = (len(self.columns) * dim + dense, *hidden)
        layers = [nn.Sequential(nn.Linear(width, following), nn.ReLU()) for width, following in pairwise(widths)]
        self.deep = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        self.wide_dense = nn.Linear(dense, 1)
        for table in (module for module in self.embedding.modules() if isinstance(module, nn.Embedding)):
            nn.init.normal_(table.weight, std=0.01)

    def _places(self, pair: Sequence[str]) -> tuple[int, int]:
        if len(pair) != 2 or not set(pair) <= set(self.columns):
            raise ValueError(
                f"module.crosses has {list(pair)} (allowed: two of the columns {', '.join(self.columns)}). "
                "Give for example [site, device]."
            )
        return self.columns.index(pair[0]), self.columns.index(pair[1])

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Ids ``(B, columns)`` and numbers ``(B, dense)`` to logits ``(B,)``."""
        logits: Tensor = self._wide(ids, dense) + self._deep(ids, dense)
        return logits

    def _wide(self, ids: Tensor, dense: Tensor) -> Tensor:
        table: Any = self.embedding["wide"]
        singles = [ids[:, column] * (column + 1) for column in range(ids.shape[1])]
        pairs = [crossed(ids[:, left], ids[:, right]) for left, right in self.crosses]
        weights: Tensor = table(hashed(torch.stack(singles + pairs, dim=1), table.num_embeddings))
        logits: Tensor = weights.sum(dim=(1, 2)) + self.wide_dense(dense)[:, 0]
        return logits

    def _deep(self, ids: Tensor, dense: Tensor) -> Tensor:
        tables: Any = self.embedding["deep"]
        vectors = [
            tables[name](hashed(ids[:, column], tables[name].num_embeddings))
            for column, name in enumerate(self.columns)
        ]
        outputs: Tensor = self.deep(torch.cat([*vectors, dense], dim=1))
        return outputs[:, 0]

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean log loss."""
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss``."""
        self._log_held_out("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test_loss``."""
        self._log_held_out("test", batch)

    def predict_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        """Probabilities of a click, ``(B,)``."""
        return torch.sigmoid(self(*batch[:2]))

    def configure_optimizers(self) -> Optimizer:
        """The optimizer of all parameters."""
        return self.optimizer_factory(self.parameters())

    def _loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, dense, clicked = batch
        return F.binary_cross_entropy_with_logits(self(ids, dense), clicked)

    def _log_held_out(self, stage: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        loss = self._loss(batch)
        shared: dict[str, Any] = {"batch_size": len(batch[0]), "sync_dist": True}
        self.log(f"{stage}_loss", loss, prog_bar=True, **shared)
        best_loss = getattr(getattr(self.trainer, "datamodule", None), "best_loss", None)
        if best_loss is not None:
            self.log(f"{stage}_excess", loss - best_loss(stage), **shared)


class ClickData(LightningDataModule):
    """A log of clicks that is drawn, not recorded (``click_log``), so the best loss is known.

    Args:
        batch_size: impressions per micro-batch.
        samples: impressions in all; the first 80 % train, the next 10 % validate, the rest tests.
        seed: of the log, apart from the run's seed.
    """

    def __init__(self, batch_size: int = 128, samples: int = 100_000, seed: int = 0) -> None:
        super().__init__()
        if samples < 10:
            raise ValueError(f"data.samples={samples} (allowed: 10 or more). Give for example 100000.")
        self.batch_size, self.samples, self.seed = batch_size, samples, seed
        self.splits: dict[str, ClickLog] = {}

    def setup(self, stage: str) -> None:
        """Draw and split the log."""
        if self.splits:
            return
        log = draw_click_log(self.samples, self.seed)
        cuts = (0, self.samples * 8 // 10, self.samples * 9 // 10, self.samples)
        for name, (first, last) in zip(("train", "val", "test"), pairwise(cuts), strict=True):
            self.splits[name] = log.part(first, last)

    def best_loss(self, split: str) -> float:
        """Mean log loss, in nats, of the true probabilities on ``"train"``, ``"val"`` or ``"test"``."""
        return self.splits[split].best_loss()

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Impressions to train on, shuffled."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Impressions to validate on."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Impressions to test on."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Impressions to test on."""
        return self._loader("test")

    def _loader(self, split: str, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        log = self.splits[split]
        return DataLoader(TensorDataset(log.ids, log.dense, log.clicked), self.batch_size, shuffle=shuffle)
