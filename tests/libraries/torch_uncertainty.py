"""torch-uncertainty: its routines, with networks of the library and an optimizer that is made with the module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.losses import DistributionNLLLoss
from torch_uncertainty.models.mlp import mlp, packed_mlp
from torch_uncertainty.routines import ClassificationRoutine, RegressionRoutine
from torch_uncertainty.transforms import RepeatTarget

from tests.libraries.base import order, rows_of

SAMPLES, FEATURES, CLASSES, ESTIMATORS = 24, 8, 4, 2
HIDDEN = [32, 32]


def loader(classes: int, batch: int, shuffled: bool) -> DataLoader:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    # Learned in a few steps: some metrics are NaN for a classifier that is always wrong.
    targets = inputs[:, :classes].argmax(dim=1) if classes else inputs.sum(dim=1)
    data = TensorDataset(inputs, targets)
    return DataLoader(data, batch_size=batch, sampler=order(data, shuffled))


def recipe(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def classifier(network: Any, **options: Any) -> Any:
    return ClassificationRoutine(network(), CLASSES, nn.CrossEntropyLoss(), optim_recipe=recipe, **options)


def regression() -> Any:
    network = mlp(FEATURES, 1, HIDDEN, dist_family="normal")
    return RegressionRoutine(network, 1, DistributionNLLLoss(), dist_family="normal", optim_recipe=recipe)


# A network and its optimizer are no hyperparameters, and forward() of a batch is no prediction.
routines = partial(rows_of, predicts=False, loads=None)
ROWS = [
    *routines(
        "ClassificationRoutine, packed ensemble",
        partial(
            classifier,
            partial(packed_mlp, FEATURES, CLASSES, num_estimators=ESTIMATORS, hidden_dims=HIDDEN, alpha=2.0),
            is_ensemble=True,
            format_batch_fn=RepeatTarget(num_repeats=ESTIMATORS),
        ),
        partial(loader, CLASSES),
    ),
    # Not shuffled.
    *routines("RegressionRoutine, normal distribution", regression, partial(loader, 0))[:1],
]
