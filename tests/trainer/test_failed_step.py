"""An error within a step surfaces and leaves a state to resume; what hooks and user code do around steps."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError
from torchmetrics.wrappers import MetricTracker

from tests.parity.harness import make_trainer
from trainwright.core.errors import CheckpointError


class Net(pl.LightningModule):
    """Blocks between two layers; fails at a ``place`` of the fourth step."""

    def __init__(self, place: str = "", kind: type = int, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters()
        self.place, self.enter, self.head = place, nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))

    def _fail_at(self, place: str) -> None:
        if self.place == place and self.global_step == 3:
            raise ValueError("boom")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.enter(batch)
        for block in self.blocks:
            x = x + block(x)
        self._fail_at("forward")
        x.register_hook(lambda _: self._fail_at("backward"))
        return self.head(x).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._fail_at("hook")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def resumed(strategy: str, place: str) -> list[Any]:
    loader = DataLoader(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)
    options: dict[str, Any] = {"global_batch_size": 8, "max_steps": 6, "enable_checkpointing": True}
    make_trainer(strategy, **options).fit(whole := Net(), loader)
    trainer = make_trainer(strategy, **options, callbacks=[OnExceptionCheckpoint(f"saved-{place}")])
    with pytest.raises(ValueError, match="boom"):
        trainer.fit(Net(place), loader)
    make_trainer(strategy, **options).fit(again := Net(), loader, ckpt_path=f"saved-{place}/on_exception.ckpt")
    return [{name: value.tolist() for name, value in each.state_dict().items()} for each in (whole, again)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", ["forward", "backward", "hook"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_the_state_before_a_failed_step_resumes(ranks: Any, strategy: str, place: str) -> None:
    for whole, again in ranks(resumed, 2, strategy, place):
        assert whole == again


class Between(pl.LightningModule):
    """A recurrent layer, and a metric that is copied in each validation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 1)
        self.tracker = MetricTracker(MeanSquaredError(), maximize=False)

    def _predict(self, batch: Tensor) -> Tensor:
        return self.head(self.layers(batch)[0])[:, -1, 0]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._predict(batch).square().mean()

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.tracker.update(self._predict(batch), batch.sum((1, 2)))

    def on_validation_epoch_end(self) -> None:
        self.log("error", self.tracker.compute())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def evaluated_thrice(strategy: str) -> list[float]:
    loader = DataLoader(torch.linspace(0, 1, 8 * 6 * 4).reshape(8, 6, 4), batch_size=2)
    trainer, module = make_trainer(strategy, {"certificate": "refuse"}, max_steps=2), Between()
    trainer.fit(module, loader, loader)
    return [trainer.validate(module, loader, verbose=False)[0]["error"] for _ in range(3)]


def test_recurrent_layers_and_copied_metrics_are_evaluated_again(ranks: Any) -> None:
    first, *others = ranks(evaluated_thrice, 2, "zero3")[0]
    assert others == [first, first]


class Dropping(Net):
    """Drops the gradient of a used parameter in the first steps."""

    def on_after_backward(self) -> None:
        if self.global_step < 2:
            self.head.weight.grad = None


def dropped(strategy: str, batch_size: int) -> list[Any]:
    loader = DataLoader(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), batch_size=batch_size)
    make_trainer(strategy, max_steps=4).fit(module := Dropping(), loader)
    return [value.flatten().tolist() for value in module.state_dict().values()]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_hooks_may_drop_gradients(ranks: Any, strategy: str) -> None:
    expected = ranks(dropped, 1, "single", 8)[0]
    for found, one in zip(ranks(dropped, 2, strategy, 4)[0], expected, strict=True):
        assert found == pytest.approx(one, abs=1e-4)


def test_defaults_of_hyperparameters_left_out_are_named(tmp_path: Path) -> None:
    trainer, module = make_trainer("single", max_steps=1), Net(kind=float)
    trainer.fit(module, DataLoader(torch.randn(8, 8), batch_size=4))
    trainer.save_checkpoint(path := str(tmp_path / "saved.ckpt"))
    with pytest.warns(UserWarning, match=r"hyper-parameters kind, .*load_from_checkpoint\(path, kind=\.\.\.\)"):
        assert Net.load_from_checkpoint(path).hparams.kind is int
    assert Net.load_from_checkpoint(path, kind=float).hparams.kind is float


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_other_kinds_of_numbers_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    loader, state = DataLoader(torch.randn(8, 8), batch_size=4), {k: v.clone() for k, v in Net().state_dict().items()}
    state["enter.weight"] = state["enter.weight"].half()
    save_file(state, path := str(tmp_path / "model.safetensors"))
    make_trainer("single", {"init_from": path}, max_steps=1).fit(Net(), loader)
    save_file({**state, "enter.weight": state["enter.weight"].to(dtype)}, path)
    with pytest.raises(CheckpointError, match=rf"enter.weight: saved as {dtype}, the module has torch.float32"):
        make_trainer("single", {"init_from": path}, max_steps=1).fit(Net(), loader)


class Skips(Net):
    """Returns a loss only in some steps; perhaps steps by itself."""

    def __init__(self, losses: set[int], manual: bool = False, has_optimizer: bool = True) -> None:
        super().__init__()
        self.losses, self.automatic_optimization, self.has_optimizer = losses, not manual, has_optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx in self.losses else None

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() if self.has_optimizer else None


@pytest.mark.parametrize("options", [{}, {"profiler": "simple"}])
def test_epoch_without_loss(options: dict[str, Any]) -> None:
    loader = DataLoader(torch.randn(16, 8), batch_size=4)
    for module in (Skips({2}), Skips(set(), manual=True), Skips(set(), has_optimizer=False)):
        make_trainer("single", max_epochs=2, **options).fit(module, loader)
    trainer = make_trainer("single", max_epochs=2, **options)
    with pytest.raises(RuntimeError, match=r"None for all 4 micro-batches.*self.automatic_optimization = False"):
        trainer.fit(Skips(set()), loader)
    assert trainer.global_step == 4
