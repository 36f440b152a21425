"""schnetpack: energies of molecules, and forces as their derivatives."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import tests.libraries.alias  # noqa: F401  # isort: skip

import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, dataloader

if not hasattr(dataloader, "T_co"):
    # The library imports this type variable, which newer releases of torch don't have.
    dataloader.T_co = TypeVar("T_co", covariant=True)  # type: ignore[attr-defined]

import schnetpack as spk
from schnetpack.data.loader import _atoms_collate_fn as collate

from tests.libraries.base import order, rows_of

SAMPLES, ATOMS, CUTOFF, DIM = 24, 5, 5.0, 16


class Molecules(Dataset):
    """Atoms and pairs of them, with an energy and forces, as the library's data sets give them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.positions = 2 * torch.randn(SAMPLES, ATOMS, 3, generator=generator)
        self.numbers = torch.randint(1, 10, (SAMPLES, ATOMS), generator=generator)
        self.energies = torch.randn(SAMPLES, 1, generator=generator)
        self.forces = torch.randn(SAMPLES, ATOMS, 3, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first, second = (~torch.eye(ATOMS, dtype=torch.bool)).nonzero(as_tuple=True)
        return {
            spk.properties.Z: self.numbers[index],
            spk.properties.R: self.positions[index].clone(),
            spk.properties.idx_i: first,
            spk.properties.idx_j: second,
            spk.properties.offsets: torch.zeros(len(first), 3),
            spk.properties.n_atoms: torch.tensor([ATOMS]),
            spk.properties.energy: self.energies[index],
            spk.properties.forces: self.forces[index],
        }


def loader(batch: int, shuffled: bool) -> DataLoader:
    data = Molecules()
    return DataLoader(data, batch, sampler=order(data, shuffled), collate_fn=collate)


def output(name: str) -> Any:
    metrics = {"MAE": torchmetrics.MeanAbsoluteError()}
    return spk.task.ModelOutput(name=name, loss_fn=torch.nn.MSELoss(), metrics=metrics)


def task(representation: Any, forces: bool) -> Any:
    basis = spk.nn.GaussianRBF(n_rbf=8, cutoff=CUTOFF)
    made = representation(
        n_atom_basis=DIM, n_interactions=2, radial_basis=basis, cutoff_fn=spk.nn.CosineCutoff(CUTOFF), max_z=10
    )
    names = [spk.properties.energy, *([spk.properties.forces] if forces else [])]
    model = spk.model.NeuralNetworkPotential(
        representation=made,
        input_modules=[spk.atomistic.PairwiseDistances()],
        output_modules=[
            spk.atomistic.Atomwise(n_in=DIM, output_key=spk.properties.energy),
            *([spk.atomistic.Forces()] if forces else []),
        ],
    )
    return spk.task.AtomisticTask(model, list(map(output, names)), optimizer_args={"lr": 1e-3, "eps": 1e-4})


# The model is among the hyperparameters.
atoms = partial(rows_of, make_loader=loader, package="pytorch_lightning", loads=lambda: {"weights_only": False})
ROWS = [
    *atoms("AtomisticTask, SchNet", partial(task, spk.representation.SchNet, False)),
    *atoms(
        "AtomisticTask, PaiNN, forces",
        partial(task, spk.representation.PaiNN, True),
        predicts=False,
        trainer=lambda: {"inference_mode": False},
    ),
]
