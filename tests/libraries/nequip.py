"""nequip: equivariant networks, whose loss is a metric object, and whose weights may have an average."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from nequip.data import AtomicDataDict
from nequip.train import EMALightningModule, NequIPLightningModule
from nequip.utils.global_state import set_global_state
from torch import Tensor
from torch.utils.data import DataLoader

from tests.libraries.base import order, rows_of

SAMPLES, ATOMS = 24, 5
TYPES = ("C", "H", "O")
MODEL = {
    "_target_": "nequip.model.NequIPGNNModel",
    "seed": 3,
    "model_dtype": "float32",
    "compile_mode": "eager",
    "type_names": list(TYPES),
    "r_max": 5.0,
    "num_layers": 2,
    "l_max": 1,
    "num_features": 8,
    "radial_mlp_width": 16,
    "avg_num_neighbors": float(ATOMS - 1),
}


def molecules() -> list[dict[str, Tensor]]:
    """Frames with a list of neighbors, as the library's transforms give them."""
    generator = torch.Generator().manual_seed(11)
    draw = partial(torch.randn, generator=generator)
    pairs = (~torch.eye(ATOMS, dtype=torch.bool)).nonzero().T
    return [
        {
            AtomicDataDict.POSITIONS_KEY: draw(ATOMS, 3),
            AtomicDataDict.ATOM_TYPE_KEY: torch.randint(len(TYPES), (ATOMS,), generator=generator),
            AtomicDataDict.EDGE_INDEX_KEY: pairs,
            AtomicDataDict.NUM_NODES_KEY: torch.tensor([ATOMS]),
            AtomicDataDict.TOTAL_ENERGY_KEY: draw(1, 1),
            AtomicDataDict.FORCE_KEY: draw(ATOMS, 3),
        }
        for _ in range(SAMPLES)
    ]


def loader(batch: int, shuffled: bool) -> DataLoader:
    data = molecules()
    return DataLoader(data, batch, sampler=order(data, shuffled), collate_fn=AtomicDataDict.batched_from_list)


def module(kind: Any, **options: Any) -> Any:
    """A module whose loss is that of a rank's own samples, which have as many atoms on each."""
    set_global_state()
    made = kind(
        model=MODEL,
        num_datasets={"train": 1, "val": 1, "test": 0, "predict": 0},
        optimizer={"_target_": "torch.optim.Adam", "lr": 1e-3, "eps": 1e-4},
        loss={"_target_": "nequip.train.EnergyForceLoss"},
        val_metrics={"_target_": "nequip.train.EnergyForceMetrics"},
        **options,
    )
    for metric in made.loss.values():
        metric.dist_sync_on_step = False
    return made


frames = partial(rows_of, make_loader=loader, predicts=False, trainer=lambda: {"inference_mode": False})
# Only the first is shuffled and loaded.
ROWS = [
    *frames("NequIPLightningModule", partial(module, NequIPLightningModule)),
    *frames("EMALightningModule", partial(module, EMALightningModule, ema_decay=0.9))[:1],
]
