"""The ``wide_deep`` recipe: embeddings of categorical columns and a network of dense layers predict clicks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer
from torch.utils.data import DataLoader, TensorDataset

COLUMNS: Mapping[str, int] = {"user": 1000, "item": 400, "site": 60, "device": 8}
"""Categorical columns and how many different values each has."""

DENSE_COLUMNS = 4
"""Columns of numbers, standard normal."""

_FACTORS = 4
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio in 64 bits


@dataclass(frozen=True)
class ClickLog:
    """Impressions of advertisements, and which were clicked.

    Args:
        ids: int64 ``(N, 4)``, one column for each of :data:`COLUMNS`: 64-bit numbers without order, as a hash of a
            name is.
        dense: float32 ``(N, 4)``.
        clicked: float32 ``(N,)``, 0 or 1.
        logits: float32 ``(N,)``, of the probabilities by which ``clicked`` was drawn.
    """

    ids: Tensor
    dense: Tensor
    clicked: Tensor
    logits: Tensor

    def __len__(self) -> int:
        return len(self.clicked)

    def best_loss(self) -> float:
        """Mean log loss, in nats, of whoever knows the true probabilities; no model has less but by chance."""
        return F.binary_cross_entropy_with_logits(self.logits, self.clicked).item()

    def part(self, first: int, last: int) -> ClickLog:
        """The impressions ``[first, last)``."""
        return ClickLog(*(tensor[first:last] for tensor in (self.ids, self.dense, self.clicked, self.logits)))


def draw_click_log(samples: int, seed: int = 0, exponent: float = 1.1) -> ClickLog:
    """Draw a log; the same one for the same arguments.

    Values are drawn with probability proportional to ``rank ** -exponent`` (Zipf), so that a batch has few of the many
    rows of a table. The logit of a click is the sum of a weight of each value, of a product of four factors of the user
    and of the item, of a weight of each pair of site and device, and of two terms of the dense columns, one of which is
    not linear.

    Args:
        samples: impressions.
        seed: of everything that is drawn; the first n impressions do not depend on how many follow only if ``samples``
            is the same.
        exponent: 0 draws all values equally often.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    world = {name: (normal(size), normal(size, _FACTORS)) for name, size in COLUMNS.items()}
    pairs, slopes = normal(COLUMNS["site"], COLUMNS["device"]), normal(DENSE_COLUMNS)
    values = {name: _zipf(size, samples, exponent, generator) for name, size in COLUMNS.items()}
    dense = normal(samples, DENSE_COLUMNS)
    logits = torch.full((samples,), -1.0)
    for name, value in values.items():
        logits += 0.5 * world[name][0][value]
    logits += 0.5 * (world["user"][1][values["user"]] * world["item"][1][values["item"]]).sum(dim=1)
    logits += 0.7 * pairs[values["site"], values["device"]]
    logits += 0.3 * dense @ slopes + 0.5 * torch.tanh(dense[:, 0] * dense[:, 1])
    clicked = torch.bernoulli(torch.sigmoid(logits), generator=generator)
    ids = torch.stack([_name(column, value) for column, value in enumerate(values.values())], dim=1)
    return ClickLog(ids, dense, clicked, logits)


def hashed(ids: Tensor, rows: int) -> Tensor:
    """Rows of a table for 64-bit ids, int64 from 0 to ``rows - 1``; the same in every process and on every device."""
    mixed = (ids ^ (ids >> 29)) * _ODD
    return torch.remainder((mixed ^ (mixed >> 32)) * _ODD >> 16, rows)


def crossed(left: Tensor, right: Tensor) -> Tensor:
    """One 64-bit id for each pair of ids; which is left matters."""
    return (left * _ODD) ^ (right + (left >> 7))


def _zipf(size: int, samples: int, exponent: float, generator: torch.Generator) -> Tensor:
    weights = torch.arange(1, size + 1, dtype=torch.float64) ** -exponent
    return torch.multinomial(weights, samples, replacement=True, generator=generator)


def _name(column: int, values: Tensor) -> Tensor:
    """What a log has in place of the value's rank."""
    mixed = (values + (column + 1) * 1_000_003) * _ODD
    return (mixed ^ (mixed >> 31)) * _ODD


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
