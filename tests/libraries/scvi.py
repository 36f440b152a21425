"""scvi-tools: training plans of its models on generated counts of genes.

Variational encoders draw noise in each step; here they give their means, so that layouts can be compared.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import scvi
import torch
from anndata import AnnData
from scvi.dataloaders import AnnDataLoader
from scvi.train import ClassifierTrainingPlan, SemiSupervisedTrainingPlan, TrainingPlan
from torch.utils.data import DataLoader

from tests.libraries.base import order, rows_of

CELLS, GENES, BATCHES, LABELS, LATENT = 24, 16, 2, 3, 4


def _mean(distribution: Any, sample_shape: Any = ()) -> torch.Tensor:
    return distribution.mean.expand(torch.Size(sample_shape) + distribution.mean.shape)


torch.distributions.Normal.rsample = _mean  # type: ignore[method-assign, assignment]
torch.distributions.Normal.sample = _mean  # type: ignore[method-assign, assignment]


@cache
def cells() -> AnnData:
    random = np.random.default_rng(0)
    found = AnnData(random.poisson(3.0, size=(CELLS, GENES)).astype(np.float32))
    found.obs["batch"] = [f"batch {number % BATCHES}" for number in range(CELLS)]
    found.obs["label"] = [f"label {number % LABELS}" for number in range(CELLS)]
    return found


def model(kind: Any, **options: Any) -> Any:
    labels: dict[str, Any] = {"labels_key": "label"}
    if kind is scvi.model.SCANVI:
        labels["unlabeled_category"] = "unknown"
    kind.setup_anndata(cells(), batch_key="batch", **labels)
    small: dict[str, Any] = {"n_hidden": 16, "n_latent": LATENT, "dropout_rate": 0.0}
    return kind(cells(), **{**small, **options})


def module(kind: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    return model(kind, **options).module


def anndata_loader(batch: int, shuffled: bool) -> DataLoader:
    made = AnnDataLoader(model(scvi.model.SCVI).adata_manager, batch_size=batch)
    made.sampler.sampler = order(made.dataset, shuffled)  # type: ignore[attr-defined]
    return made


def loader(batch: int, shuffled: bool) -> DataLoader:
    """A plain loader that reads as theirs does: one index of the data set is a list of cells."""
    theirs = anndata_loader(batch, shuffled)
    return DataLoader(theirs.dataset, batch_size=None, sampler=theirs.sampler)


norm = {"use_batch_norm": "none", "use_layer_norm": "both"}
scvi_module = partial(module, scvi.model.SCVI, **norm)
linear_module = partial(module, scvi.model.LinearSCVI, use_batch_norm=False)
scanvi_module = partial(module, scvi.model.SCANVI, classifier_parameters={"dropout_rate": 0.0}, **norm)


def classifier() -> Any:
    from scvi.module import Classifier

    return Classifier(GENES, n_hidden=16, n_labels=LABELS, dropout_rate=0.0, use_batch_norm=False, logits=True)


# Models have encoders that a step may leave out.
UNUSED = {"ddp": {"find_unused_parameters": True}}
plans = partial(rows_of, make_loader=loader, predicts=False, options=UNUSED)
ROWS = [
    *plans("TrainingPlan of SCVI", lambda: TrainingPlan(scvi_module()), loads=lambda: {"module": scvi_module()}),
    *plans(
        "TrainingPlan of SCVI, AnnDataLoader",
        lambda: TrainingPlan(scvi_module()),
        make_loader=anndata_loader,
        loads=None,
    ),
    *plans(
        "TrainingPlan of SCVI, BatchNorm",
        lambda: TrainingPlan(module(scvi.model.SCVI)),
        loads=lambda: {"module": module(scvi.model.SCVI)},
        batch_norm=True,
    ),
    *plans(
        "TrainingPlan of LinearSCVI", lambda: TrainingPlan(linear_module()), loads=lambda: {"module": linear_module()}
    ),
    *plans(
        "SemiSupervisedTrainingPlan of SCANVI",
        lambda: SemiSupervisedTrainingPlan(scanvi_module(), LABELS),
        loads=lambda: {"module": scanvi_module(), "n_classes": LABELS},
    ),
    *plans(
        "ClassifierTrainingPlan",
        lambda: ClassifierTrainingPlan(classifier()),
        loads=lambda: {"classifier": classifier()},
    ),
]
