"""chemprop: message passing on molecules, of bonds, of atoms, of pairs, and with predictions of atoms and bonds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import chemprop
import numpy as np
from chemprop.data import build_dataloader
from torch.utils.data import DataLoader

from tests.libraries.base import order, rows_of

SMILES = (
    *("CCO", "CCN", "CCC", "CC=O", "c1ccccc1", "CC(=O)O", "CCCl", "CCBr", "OCCO", "NCCN", "CCOCC", "CC#N"),
    *("C1CCCCC1", "c1ccncc1", "CC(C)O", "CC(C)N", "CCS", "CSC", "C=CC=C", "CC(=O)N", "OC=O", "CCF", "CN(C)C", "COC"),
)
DIM = 16


def _targets(classes: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(0)
    values = random.normal(size=(len(SMILES), 1)) if classes == 0 else random.integers(classes, size=(len(SMILES), 1))
    return values.astype(float)


def molecules(classes: int = 0) -> Any:
    points = [
        chemprop.data.MoleculeDatapoint.from_smi(smi, y) for smi, y in zip(SMILES, _targets(classes), strict=True)
    ]
    return chemprop.data.MoleculeDataset(points, chemprop.featurizers.SimpleMoleculeMolGraphFeaturizer())


def pairs() -> Any:
    others = [chemprop.data.MoleculeDatapoint.from_smi(smi) for smi in reversed(SMILES)]
    second = chemprop.data.MoleculeDataset(others, chemprop.featurizers.SimpleMoleculeMolGraphFeaturizer())
    return chemprop.data.MulticomponentDataset([molecules(), second])


def loader(samples: Callable[[], Any], batch: int, shuffled: bool) -> DataLoader:
    data = samples()
    made = build_dataloader(data, batch_size=batch, shuffle=False)
    return DataLoader(data, batch, sampler=order(data, shuffled), collate_fn=made.collate_fn)


def mpnn(
    passing: Callable[..., Any] = chemprop.nn.BondMessagePassing,
    predictor: Callable[..., Any] = chemprop.nn.RegressionFFN,
    **options: Any,
) -> Any:
    return chemprop.models.MPNN(
        passing(d_h=DIM),
        chemprop.nn.MeanAggregation(),
        predictor(input_dim=DIM, hidden_dim=DIM, n_layers=2),
        init_lr=1e-3,
        max_lr=1e-2,
        **options,
    )


def multicomponent() -> Any:
    blocks = [chemprop.nn.BondMessagePassing(d_h=DIM) for _ in range(2)]
    return chemprop.models.MulticomponentMPNN(
        chemprop.nn.MulticomponentMessagePassing(blocks, n_components=2),
        chemprop.nn.MeanAggregation(),
        chemprop.nn.RegressionFFN(input_dim=2 * DIM, hidden_dim=DIM),
        init_lr=1e-3,
        max_lr=1e-2,
    )


regression = partial(rows_of, make_loader=partial(loader, molecules))
ROWS = [
    *regression("MPNN", mpnn),
    *regression(
        "MPNN of atoms, BatchNorm", partial(mpnn, chemprop.nn.AtomMessagePassing, batch_norm=True), batch_norm=True
    ),
    *regression("MPNN, metrics", lambda: mpnn(metrics=[chemprop.nn.metrics.RMSE(), chemprop.nn.metrics.MAE()])),
    *rows_of(
        "MPNN, classes",
        partial(mpnn, predictor=partial(chemprop.nn.MulticlassClassificationFFN, 3)),
        partial(loader, partial(molecules, 3)),
    ),
    *rows_of("MulticomponentMPNN", multicomponent, partial(loader, pairs)),
]
