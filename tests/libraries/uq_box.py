"""lightning-uq-box: regressions that estimate their own error.

Its classifiers have a metric with counts of a process (``EmpiricalCoverage``), which several processes don't share.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning_uq_box.models import MLP
from lightning_uq_box.uq_methods import MVERegression, QuantileRegression
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.libraries.base import order, rows_of

SAMPLES, FEATURES = 24, 8
QUANTILES = (0.1, 0.5, 0.9)


class Samples(Dataset):
    """Features and a number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.targets = self.inputs.sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"input": self.inputs[index], "target": self.targets[index]}


def loader(batch: int, shuffled: bool) -> DataLoader:
    data = Samples()
    return DataLoader(data, batch_size=batch, sampler=order(data, shuffled))


def network(outputs: int) -> nn.Module:
    return MLP(dropout_p=0.0, n_inputs=FEATURES, n_hidden=[32, 32], n_outputs=outputs)


def method(kind: Any, outputs: int, *given: Any) -> Any:
    return kind(network(outputs), *given, optimizer=partial(torch.optim.Adam, lr=1e-3, eps=1e-4))


def loaded(outputs: int, **options: Any) -> dict[str, Any]:
    return {"model": network(outputs), "optimizer": torch.optim.Adam, **options}


# predict_step() takes features, not a batch of a loader.
methods = partial(rows_of, predicts=False)
# Only the first is shuffled and loaded.
ROWS = [
    *methods("MVERegression", partial(method, MVERegression, 2, 0), loader, loads=partial(loaded, 2)),
    *methods(
        "QuantileRegression",
        partial(method, QuantileRegression, len(QUANTILES), None, list(QUANTILES)),
        loader,
    )[:1],
]
