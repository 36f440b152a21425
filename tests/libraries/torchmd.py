"""torchmd-net: energies and forces of molecules, which are a PyG ``Batch``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data
from torchmdnet.module import LNNP

from tests.libraries.base import order, rows_of
from tests.libraries.damped import Damped

# A number of samples with which all batches are of one size: the library averages over batches.
SAMPLES, ATOMS, DIM = 32, 5, 16
OPTIONS = {
    "load_model": None,
    "precision": 32,
    "embedding_dimension": DIM,
    "num_layers": 2,
    "num_rbf": 8,
    "rbf_type": "expnorm",
    "trainable_rbf": False,
    "activation": "silu",
    "attn_activation": "silu",
    "num_heads": 4,
    "distance_influence": "both",
    "neighbor_embedding": True,
    "aggr": "add",
    "equivariance_invariance_group": "O(3)",
    "cutoff_lower": 0.0,
    "cutoff_upper": 5.0,
    "max_z": 10,
    "max_num_neighbors": 16,
    "atom_filter": -1,
    "prior_model": None,
    "output_model": "Scalar",
    "reduce_op": "add",
    "remove_ref_energy": False,
    "y_weight": 1.0,
    "neg_dy_weight": 1.0,
    "ema_alpha_y": 1.0,
    "ema_alpha_neg_dy": 1.0,
    "lr": 1e-3,
    "lr_factor": 0.8,
    "lr_min": 1e-6,
    "lr_patience": 10,
    "lr_warmup_steps": 2,
    "weight_decay": 0.01,
}


class Potential(Damped, LNNP):
    """Otherwise as it is."""


def molecules() -> list[Data]:
    generator = torch.Generator().manual_seed(11)
    draw = partial(torch.randn, generator=generator)
    return [
        Data(
            z=torch.randint(1, 10, (ATOMS,), generator=generator),
            pos=2 * draw(ATOMS, 3),
            y=draw(1, 1),
            neg_dy=draw(ATOMS, 3),
        )
        for _ in range(SAMPLES)
    ]


def loader(batch: int, shuffled: bool) -> DataLoader:
    data = molecules()
    return DataLoader(data, batch, sampler=order(data, shuffled), collate_fn=Batch.from_data_list)


def potential(kind: str, derivative: bool) -> Any:
    return Potential({**OPTIONS, "model": kind, "derivative": derivative})


# Only the first is shuffled and loaded.
ROWS = [
    *rows_of("LNNP, graph-network", partial(potential, "graph-network", False), loader),
    *rows_of(
        "LNNP, tensornet, forces",
        partial(potential, "tensornet", True),
        loader,
        trainer=lambda: {"inference_mode": False},
    )[:1],
]
