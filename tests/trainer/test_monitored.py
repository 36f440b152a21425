"""Schedulers that monitor a value of the step get that of the global batch, the same on all ranks."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from tests.parity.harness import make_trainer

# As logged -> options of `self.log`.
KINDS: dict[str, dict[str, Any]] = {
    "mean": {},
    "both": {"on_step": True, "on_epoch": True},
    "synchronized": {"sync_dist": True},
    "max": {"reduce_fx": "max"},
    "sum": {"reduce_fx": "sum"},
    "rank zero": {"rank_zero_only": True},
}


class Net(pl.LightningModule):
    def __init__(self, kind: str, interval: str = "step") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.kind, self.interval = nn.Linear(4, 1), kind, interval
        self.metric, self.values, self.rates = MeanSquaredError(), [], []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses = (self.net(batch)[:, 0] - batch.sum(1)).square()
        if self.kind == "metric":
            self.metric(self.net(batch)[:, 0], batch.sum(1))
            self.log("value", self.metric, on_step=True, on_epoch=False)
        else:
            reduced = {"max": losses.max(), "sum": losses.sum()}.get(self.kind, losses.mean())
            self.log("value", reduced, **KINDS[self.kind])
        return losses.mean()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.values.append(float(metric))
        super().lr_scheduler_step(scheduler, metric)
        self.rates.append(scheduler.optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
        monitor = "value_step" if self.kind == "both" else "value"
        return [optimizer], [{"scheduler": plateau, "interval": self.interval, "monitor": monitor}]


def monitored(strategy: str, options: dict[str, Any], batch_size: int, kind: str, interval: str = "step") -> Any:
    data = torch.randn(44, 4, generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(strategy, options, max_epochs=2, global_batch_size=8, limit_val_batches=0)
    trainer.fit(module := Net(kind, interval), DataLoader(data, batch_size=batch_size))
    return module.values, module.rates


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["mean", "both", "synchronized", "max", "sum"])
@pytest.mark.parametrize(
    ("strategy", "options", "batch_size"),
    [("ddp", {}, 4), ("ddp", {}, 2), ("zero3", {}, 4), ("single", {}, 4), ("hybrid", {"replicate": 2, "stage": 1}, 4)],
)
def test_the_value_is_that_of_the_global_batch(
    ranks: Any, strategy: str, options: dict[str, Any], batch_size: int, kind: str
) -> None:
    [(expected, rates)] = ranks(monitored, 1, "single", {}, 8, kind)
    for found, used in ranks(monitored, 1 if strategy == "single" else 2, strategy, options, batch_size, kind):
        assert found == pytest.approx(expected, rel=1e-5)
        assert used == rates


def test_step_values_by_epoch_and_of_rank_zero_agree(ranks: Any) -> None:
    [(expected, _)] = ranks(monitored, 1, "single", {}, 8, "mean", "epoch")
    first, second = ranks(monitored, 2, "ddp", {}, 4, "mean", "epoch")
    assert first == second
    assert first[0] == pytest.approx(expected, rel=1e-5)
    first, second = ranks(monitored, 2, "ddp", {}, 4, "rank zero")
    assert first == second


def refusal() -> str:
    with pytest.raises(RuntimeError, match="monitors value") as caught:
        monitored("ddp", {}, 4, "metric")
    return str(caught.value)


def test_metrics_of_one_rank_are_refused(ranks: Any) -> None:
    assert "dist_sync_on_step=True" in ranks(refusal, 2)[0]
