"""Loss scaling with precision=16-mixed."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.callbacks.modules import train
from trainwright import Trainer
from trainwright.trainer.loop.loss_scale import loss_scale_problems

INFINITE = 1e30


class Module(pl.LightningModule):
    """Overflows for large batches, and records the scale of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.scales: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        plugin: Any = self.trainer.precision_plugin
        self.scales.append(plugin.scaler.get_scale())
        return (self.weight * batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def scales(loss_scale: dict[str, Any], batches: list[float], **options: Any) -> list[float]:
    asked: dict[str, Any] = {"precision": "16-mixed", "strategy": "single", "max_epochs": 1, **options}
    data = DataLoader(torch.tensor(batches))  # type: ignore[arg-type]
    module, _ = train(module=Module(), kind=Trainer, data=data, loss_scale=loss_scale, **asked)
    return module.scales  # type: ignore[no-any-return]


def test_dynamic() -> None:
    # Doubled after two good steps in a row, halved after an overflow, at least the minimum.
    over = INFINITE * 1e9
    batches = [1.0, 1.0, over, over, over, over, 1.0]
    assert scales({"initial": 8.0, "growth_interval": 2, "least": 3.0}, batches) == [8, 8, 16, 8, 4, 3, 3]


def test_fixed() -> None:
    assert scales({"initial": 8.0, "growth_interval": 1, "fixed": True}, [1.0, INFINITE * 1e9, 1.0]) == [8, 8, 8]


def test_default() -> None:
    assert scales({}, [1.0]) == [1024.0]


@pytest.mark.parametrize(("given", "precision", "part"), [
    ({"initial": 0}, "16-mixed", "must be a finite number above 0"),
    ({"initial": float("inf")}, "16-mixed", "must be a finite number above 0"),
    ({"least": -1}, "16-mixed", "at least 0"),
    ({"growth_interval": 0}, "16-mixed", "at least 1"),
    ({"fixed": True, "least": 1.0}, "16-mixed", "needs no limit"),
    ({"initial": 8.0}, "bf16-mixed", "precision=bf16-mixed scales no loss"),
    ({"first": 8.0}, "16-mixed", "no such option"),
])  # fmt: skip
def test_refused(given: dict[str, Any], precision: str, part: str) -> None:
    [problem] = loss_scale_problems(given, precision)
    assert part in problem


def test_other_precisions() -> None:
    with pytest.raises(ValueError, match="scales no loss"):
        scales({"initial": 8.0}, [1.0], precision="32")
