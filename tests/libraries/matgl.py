"""matgl: a property and the energy and forces of crystals, which are a PyG ``Batch``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from matgl.ext.pymatgen import Structure2Graph
from matgl.graph.data import collate_fn_graph, collate_fn_pes
from matgl.models import MEGNet, TensorNet
from matgl.utils.training import ModelLightningModule, PotentialLightningModule
from pymatgen.core import Lattice, Structure
from torch.utils.data import DataLoader

from tests.libraries.base import order, rows_of
from tests.libraries.damped import Damped

SAMPLES, ATOMS, CUTOFF = 24, 4, 3.0
ELEMENTS = ("C", "N", "O")


class Property(Damped, ModelLightningModule):
    """Otherwise as it is."""


class Energies(Damped, PotentialLightningModule):
    """Otherwise as it is."""


def crystals(forces: bool) -> list[Any]:
    """Graphs with lattices, states and labels, as the library's data set gives them."""
    generator = torch.Generator().manual_seed(11)
    convert, found = Structure2Graph(ELEMENTS, CUTOFF), []
    for _ in range(SAMPLES):
        places = torch.rand(ATOMS, 3, generator=generator).tolist()
        kinds = [ELEMENTS[kind] for kind in torch.randint(len(ELEMENTS), (ATOMS,), generator=generator).tolist()]
        graph, lattice, state = convert.get_graph(Structure(Lattice.cubic(4.0), kinds, places))
        labels = {"energies": float(torch.randn((), generator=generator))}
        if forces:
            labels["forces"] = torch.randn(ATOMS, 3, generator=generator)
        found.append((graph, lattice, torch.as_tensor(state, dtype=torch.float32), labels))
    return found


def loader(forces: bool, batch: int, shuffled: bool) -> DataLoader:
    data = crystals(forces)
    collate = partial(collate_fn_pes, include_stress=False) if forces else collate_fn_graph
    return DataLoader(data, batch, sampler=order(data, shuffled), collate_fn=collate)


def megnet() -> Any:
    return MEGNet(element_types=ELEMENTS, cutoff=CUTOFF, dim_edge_embedding=16, nblocks=2)


def tensornet() -> Any:
    return TensorNet(element_types=ELEMENTS, cutoff=CUTOFF, units=16, num_rbf=8, use_warp=False, is_intensive=False)


def module(kind: Any, network: Callable[[], Any]) -> Any:
    return kind(network(), sync_dist=True)


# predict_step() gives the losses of a batch. Only the first is shuffled and loaded.
ROWS = [
    *rows_of(
        "ModelLightningModule, MEGNet",
        partial(module, Property, megnet),
        partial(loader, False),
        predicts=False,
        loads=lambda: {"model": megnet()},
    ),
    *rows_of(
        "PotentialLightningModule, TensorNet",
        partial(module, Energies, tensornet),
        partial(loader, True),
        predicts=False,
        trainer=lambda: {"inference_mode": False},
    )[:1],
]
