"""Manual optimization with a loss scale: gradients are true wherever user code sees them."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.harness import make_trainer

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "tensor"]


class Net(pl.LightningModule):
    """Two networks with an optimizer each; gradients of two backwards are clipped in a ``form``.

    ``explodes``: a batch with an infinite gradient.
    """

    def __init__(self, form: str, explodes: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.form, self.explodes, self.largest = form, explodes, 0.0
        self.one = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.two = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def on_after_backward(self) -> None:
        self.largest = max(self.largest, *(float(p.grad.abs().max()) for p in self.parameters() if p.grad is not None))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        factor = float("inf") if batch_idx == self.explodes else 1.0
        for network, optimizer in zip((self.one, self.two), self.optimizers(), strict=True):
            if self.form != "shared":
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            for part in (slice(None, None, 2), slice(1, None, 2)):
                loss = nn.functional.mse_loss(network(x[part]), y[part]) / 2 * factor
                if self.form == "shared":  # leaves gradients in the other network too
                    loss = loss + 0.1 * (self.one(x[part]) + self.two(x[part])).square().mean()
                self.manual_backward(loss)
            if self.form == "by hand":
                nn.utils.clip_grad_norm_(network.parameters(), 0.05)
            else:
                kind = "value" if self.form == "value" else "norm"
                self.clip_gradients(optimizer, 0.01 if kind == "value" else 0.05, kind)
            optimizer.step()
            if self.form != "shared":
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(network.parameters(), lr=0.5) for network in (self.one, self.two)]


def moved(strategy: str, devices: int, form: str, explodes: int | None, precision: str) -> tuple[float, ...]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    scale = {"loss_scale": {"initial": 256.0}} if precision == "16-mixed" else {}
    options = {"find_unused_parameters": True} if strategy == "ddp" else {}
    trainer = make_trainer(strategy, options, max_epochs=1, precision=precision, **scale)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8 // devices)
    trainer.fit(module := Net(form, explodes), loader)
    start = list(Net(form).state_dict().values())
    found = [value - before for value, before in zip(module.state_dict().values(), start, strict=True)]
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return (*(float(each.norm()) for each in found), module.largest, 0.0 if scaler is None else scaler.get_scale())


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ["norm", "value", "by hand", "shared"])
@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_gradients_are_unscaled_between_backward_and_step(ranks: Any, strategy: str, form: str) -> None:
    devices = 1 if strategy == "single" else 2
    *expected, _ = ranks(moved, 1, "single", 1, form, None, "32-true")[0]
    for *found, scale in ranks(
        moved, devices, strategy, 1 if strategy == "tensor" else devices, form, None, "16-mixed"
    ):
        assert scale == 256.0
        assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero3"])
def test_an_overflow_is_skipped_after_clipping_by_value(ranks: Any, strategy: str) -> None:
    devices = 1 if strategy == "single" else 2
    *all_steps, _, _ = ranks(moved, 1, "single", 1, "value", None, "32-true")[0]
    for *found, _, scale in ranks(moved, devices, strategy, devices, "value", 3, "16-mixed"):
        assert scale == 256.0 / 4, "each optimizer skipped one step"
        assert all(0.3 * one < each < 1.5 * one for each, one in zip(found, all_steps, strict=True))
