"""A generator of click logs with a known best loss. No real log: none comes with Python or scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
