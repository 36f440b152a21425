import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401 - its first import sets environment variables
import torch
from lightning.pytorch import Callback, seed_everything
from torch.optim import SGD

from tests.parity.harness import QUIET, make_trainer
from trainwright import Trainer, compose
from trainwright.recipes.tables.linear_regression import DiabetesData, LinearRegression
from trainwright.recipes.vision.bundled_data import diabetes


class SamplesOfSteps(Callback):
    """Record the inputs that this rank reads in each step."""

    def __init__(self) -> None:
        self.read: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.read.append([tuple(row) for row in batch[0].tolist()])


def fit(strategy: str, micro_batch_size: int, steps: int) -> dict[str, Any]:
    """Fit with the values of the recipe's yaml."""
    config = compose(recipe="linear_regression")
    seed_everything(0)
    module = LinearRegression(optimizer=partial(SGD, lr=config.optimizer.lr, momentum=config.optimizer.momentum))
    data, samples = DiabetesData(micro_batch_size), SamplesOfSteps()
    options = {"max_steps": steps, "max_epochs": -1, "global_batch_size": config.global_batch_size}
    trainer = make_trainer(strategy, callbacks=[samples], **options)
    trainer.fit(module, data)
    return {
        "first_step": samples.read[0],
        "steps": trainer.global_step,
        "test": {name: float(value) for name, value in trainer.test(module, data, verbose=False)[0].items()},
    }


@pytest.mark.thorough
def test_ten_workers_on_disjoint_tenths_reach_the_closed_form(ranks: Callable[..., list[Any]]) -> None:
    results = ranks(fit, 10, "ddp", 45, 200)
    tenths = [set(result["first_step"]) for result in results]
    assert sorted(map(len, tenths)) == [44] * 8 + [45] * 2
    assert len(set.union(*tenths)) == 442
    for result in results:
        assert result["steps"] == 200
        assert result["test"]["distance_to_closed_form"] < 1e-4
        assert result["test"]["test_mse"] == pytest.approx(best_mse(), rel=1e-4)


# Rows of the table in docs/recipes.md.
CONSISTENCIES: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("parameter_server", {}),
    "ssp": ("parameter_server", {"consistency": "ssp", "staleness": 3}),
    "async": ("parameter_server", {"consistency": "async"}),
    "local_sgd": ("local_sgd", {"sync_every": 5}),
    "diloco": ("diloco", {"sync_every": 5, "outer_momentum": 0.5}),
    "zero3": ("zero3", {}),
}


def fit_consistencies() -> dict[str, float]:
    """Return the largest distance of a coefficient to the closed form, at one constant rate."""
    distances = {}
    for name, (strategy, options) in CONSISTENCIES.items():
        seed_everything(0)
        module = LinearRegression(optimizer=partial(SGD, lr=0.1), variance_reduction=True)
        data = DiabetesData(150, passes=10, decorrelate=True)
        trainer = make_trainer(strategy, options, max_steps=150, max_epochs=-1)
        trainer.fit(module, data)
        distances[name] = float(trainer.test(module, data, verbose=False)[0]["distance_to_closed_form"])
    return distances


@pytest.mark.thorough
def test_every_consistency_reaches_the_closed_form_at_a_constant_rate(ranks: Callable[..., list[Any]]) -> None:
    for distances in ranks(fit_consistencies, 3):
        assert max(distances.values()) < 1e-5, distances


def test_variance_reduction_needs_all_data() -> None:
    data = DiabetesData(442)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"needs a data module with a method whole\(\)"):
        Trainer(devices=1, max_steps=2, **QUIET).fit(LinearRegression(variance_reduction=True), data.train_dataloader())


def test_principal_components_have_the_same_fitted_values() -> None:
    assert best_mse(decorrelate=True) == pytest.approx(best_mse())
    inputs, _ = DiabetesData(decorrelate=True).whole()
    assert torch.allclose(inputs.T @ inputs / len(inputs), torch.eye(10, dtype=inputs.dtype))


@pytest.mark.thorough
def test_coefficients_of_a_sharded_model(ranks: Callable[..., list[Any]]) -> None:
    for result in ranks(fit, 2, "zero3", 225, 200):
        assert result["test"]["distance_to_closed_form"] < 1e-4


def test_yaml_has_the_optimal_rate_and_momentum() -> None:
    """Polyak's formula for the extreme eigenvalues of the curvature; the intercept's is 1."""
    inputs, _ = diabetes()
    eigenvalues = torch.linalg.eigvalsh(inputs.T @ inputs / len(inputs))
    smallest, largest = math.sqrt(eigenvalues[0]), math.sqrt(eigenvalues[-1])
    optimizer = compose(recipe="linear_regression").optimizer
    assert optimizer.lr == pytest.approx(4 / (largest + smallest) ** 2, rel=1e-3)
    assert optimizer.momentum == pytest.approx(((largest - smallest) / (largest + smallest)) ** 2, rel=1e-3)


def test_closed_form_has_no_gradient() -> None:
    inputs, targets = diabetes()
    coefficients, intercept = DiabetesData().closed_form()
    residuals = inputs @ coefficients + intercept - targets[:, 0]
    assert (inputs.T @ residuals).abs().max() < 1e-9
    assert abs(residuals.sum()) < 1e-9


def test_without_a_closed_form_there_is_no_distance(capsys: pytest.CaptureFixture[str]) -> None:
    data = DiabetesData(442)
    data.setup("fit")
    trainer = Trainer(devices=1, max_steps=2, **QUIET)
    module = LinearRegression()
    trainer.fit(module, data.train_dataloader())
    assert module.distance_to_closed_form() is None
    assert "closed-form" not in capsys.readouterr().out


def best_mse(decorrelate: bool = False) -> float:
    data = DiabetesData(decorrelate=decorrelate)
    inputs, targets = data.whole()
    coefficients, intercept = data.closed_form()
    return float((inputs @ coefficients + intercept - targets[:, 0]).pow(2).mean())
