"""The ``wide_deep`` recipe: click prediction from embeddings of categorical columns and dense layers."""

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

from trainwright.recipes.muon import build_optimizer

COLUMNS: Mapping[str, int] = {"user": 1000, "item": 400, "site": 60, "device": 8}
"""Categorical columns and their numbers of distinct values."""

DENSE_COLUMNS = 4
"""Number of numeric columns, standard normal."""

_FACTORS = 4
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio in 64 bits


@dataclass(frozen=True)
class ClickLog:
    """Impressions of advertisements, and which were clicked.

    Args:
        ids: int64 ``(N, 4)``, one column for each of :data:`COLUMNS`: unordered 64-bit numbers, like hashes of names.
        dense: float32 ``(N, 4)``.
        clicked: float32 ``(N,)``, 0 or 1.
        logits: float32 ``(N,)``, of the probabilities from which ``clicked`` was drawn.
    """

    ids: Tensor
    dense: Tensor
    clicked: Tensor
    logits: Tensor

    def __len__(self) -> int:
        return len(self.clicked)

    def best_loss(self) -> float:
        """Return the mean log loss, in nats, of the true probabilities, the least that a model can expect."""
        return F.binary_cross_entropy_with_logits(self.logits, self.clicked).item()

    def part(self, first: int, last: int) -> ClickLog:
        """Return the impressions ``[first, last)``."""
        return ClickLog(*(tensor[first:last] for tensor in (self.ids, self.dense, self.clicked, self.logits)))


def draw_click_log(samples: int, seed: int = 0, exponent: float = 1.1) -> ClickLog:
    """Draw a log, deterministic in its arguments.

    Values are drawn with probability proportional to ``rank ** -exponent`` (Zipf), so a batch has few of the many rows
    of a table. The logit of a click is the sum of a weight per value, a product of four factors of user and item, a
    weight per pair of site and device, and a linear and a nonlinear term of the dense columns.

    Args:
        samples: impressions.
        seed: of all random numbers; other ``samples`` change all impressions.
        exponent: 0 draws values uniformly.
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
    """Return table rows for 64-bit ids, int64 in [0, rows); the same in every process and on every device."""
    mixed = (ids ^ (ids >> 29)) * _ODD
    return torch.remainder((mixed ^ (mixed >> 32)) * _ODD >> 16, rows)


def crossed(left: Tensor, right: Tensor) -> Tensor:
    """Return one 64-bit id for each ordered pair of ids."""
    return (left * _ODD) ^ (right + (left >> 7))


def _zipf(size: int, samples: int, exponent: float, generator: torch.Generator) -> Tensor:
    weights = torch.arange(1, size + 1, dtype=torch.float64) ** -exponent
    return torch.multinomial(weights, samples, replacement=True, generator=generator)


def _name(column: int, values: Tensor) -> Tensor:
    """Return the ids that the log has instead of the values' ranks."""
    mixed = (values + (column + 1) * 1_000_003) * _ODD
    return (mixed ^ (mixed >> 31)) * _ODD


class WideDeep(LightningModule):
    """Wide & deep model (Cheng et al. 2016, arXiv:1606.07792): the sum of the logits of a linear model that memorizes
    pairs of values and of a network that generalizes from embeddings of single values.

    The names of all tables begin with ``embedding.``: ``embedding.wide`` has a weight for each hashed value and pair of
    values, ``embedding.deep.<column>`` a vector for each hashed value.

    Logs ``train_loss``, and over all impressions of a split ``val_loss`` and ``test_loss`` (log loss, nats). If the
    data module has ``best_loss``, it logs ``val_excess`` and ``test_excess`` too: the loss minus that of the true
    probabilities. ``predict`` returns the probability of a click.

    Args:
        columns: names of the categorical columns, in the order of the data.
        dense: number of dense columns.
        crosses: pairs of columns in the wide part.
        rows: rows of each deep table, into which values are hashed.
        wide_rows: rows of the wide table, into which values and pairs are hashed.
        dim: embedding width.
        hidden: widths of the dense layers.
        sparse: give the tables sparse gradients, with only the rows of a batch; needs an optimizer for sparse and dense
            gradients (Adagrad, or SGD without weight decay). ``False`` (off): dense gradients.
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
        self.crosses = tuple(self._indices(pair) for pair in crosses)
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

    def _indices(self, pair: Sequence[str]) -> tuple[int, int]:
        if len(pair) != 2 or not set(pair) <= set(self.columns):
            raise ValueError(
                f"module.crosses has {list(pair)} (allowed: two of the columns {', '.join(self.columns)}). "
                "Give for example [site, device]."
            )
        return self.columns.index(pair[0]), self.columns.index(pair[1])

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Map ids ``(B, columns)`` and numbers ``(B, dense)`` to logits ``(B,)``."""
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
        """Return the mean log loss."""
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
        """Return probabilities of a click, ``(B,)``."""
        return torch.sigmoid(self(*batch[:2]))

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer of all parameters."""
        return build_optimizer(self, self.optimizer_factory, [{"params": list(self.parameters())}])

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
    """Synthetic click log (``draw_click_log``), whose best possible loss is known.

    Args:
        batch_size: impressions per micro-batch.
        samples: total impressions; the first 80 % train, the next 10 % validate, the rest tests.
        seed: of the log, independent of the run's seed.
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
        """Return the mean log loss, in nats, of the true probabilities on ``"train"``, ``"val"`` or ``"test"``."""
        return self.splits[split].best_loss()

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return training impressions, shuffled."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return validation impressions."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return test impressions."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return test impressions."""
        return self._loader("test")

    def _loader(self, split: str, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        log = self.splits[split]
        return DataLoader(TensorDataset(log.ids, log.dense, log.clicked), self.batch_size, shuffle=shuffle)
