"""cellarium-ml: models of single cells, made in ``configure_model``, with a loss by Pyro."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from anndata._core import index
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

if not hasattr(index, "Index"):
    # The library imports these types, which newer releases of anndata have elsewhere.
    index.Index = index.Index1D = Any

from cellarium.ml import CellariumModule
from cellarium.ml.models import LogisticRegression, ProbabilisticPCA

from tests.libraries.base import order, rows_of

SAMPLES, GENES, CATEGORIES = 24, 12, 3
NAMES = [f"gene {index}" for index in range(GENES)]


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    counts, categories = map(torch.stack, zip(*samples, strict=True))
    return {"x_ng": counts, "y_n": categories, "var_names_g": np.array(NAMES)}


def loader(batch: int, shuffled: bool) -> DataLoader:
    generator = torch.Generator().manual_seed(11)
    counts = torch.randn(SAMPLES, GENES, generator=generator)
    data = TensorDataset(counts, torch.randint(CATEGORIES, (SAMPLES,), generator=generator))
    return DataLoader(data, batch, sampler=order(data, shuffled), collate_fn=collate)


def module(kind: Any, **options: Any) -> Any:
    model = kind(n_obs=SAMPLES, var_names_g=NAMES, **options)
    return CellariumModule(model=model, optim_fn=torch.optim.Adam, optim_kwargs={"lr": 1e-3, "eps": 1e-4})


# The model is among the hyperparameters.
cells = partial(rows_of, make_loader=loader, validates=False, predicts=False, loads=lambda: {"weights_only": False})
# Only the first is shuffled and loaded.
ROWS = [
    *cells(
        "CellariumModule, LogisticRegression",
        partial(module, LogisticRegression, n_categories=CATEGORIES, log_metrics=False),
    ),
    *cells(
        "CellariumModule, ProbabilisticPCA",
        partial(module, ProbabilisticPCA, n_components=2, ppca_flavor="marginalized"),
    )[:1],
]
