"""Hooks, logged values and progress of ``trainwright.Trainer`` equal those of Lightning's Trainer, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.callbacks.modules import Written
from tests.parity.harness import QUIET, whole, world_size
from trainwright.strategies.contract.registry import make_strategy

STEPS = {
    "training_step",
    "validation_step",
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_model",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "prepare_data",
    "setup",
    "teardown",
    "transfer_batch_to_device",
}
MODULE_HOOKS = sorted(STEPS | {name for name in dir(pl.LightningModule) if name.startswith("on_")} - {"on_gpu"})
CALLBACK_HOOKS = sorted(
    name
    for name in vars(pl.Callback)
    if name.startswith(("on_", "setup", "teardown")) and callable(getattr(pl.Callback, name))
)


class Learner(pl.LightningModule):
    """Logs in every way, with a scheduler per step; ``manual``: with manual optimization."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.line = torch.nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.line(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss * 2, on_step=True, on_epoch=True)
        self.log("epoch_only", loss * 3, on_step=False, on_epoch=True)
        if batch_idx == 1:
            self.log("rare", 4.0)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.line(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def listen_in_module(module: pl.LightningModule, calls: list[str], hooks: list[str]) -> None:
    """Give ``module`` a class whose hooks append their names to ``calls``."""

    def listener(name: str) -> Callable[..., Any]:
        original = getattr(type(module), name)

        def hook(self: pl.LightningModule, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"module.{name}({describe(args, kwargs)})")
            return original(self, *args, **kwargs)

        return hook

    module.__class__ = type("Listening", (type(module),), {name: listener(name) for name in hooks})


def listening_callback(calls: list[str]) -> pl.Callback:
    def listener(name: str) -> Callable[..., Any]:
        def hook(self: pl.Callback, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"callback.{name}({describe(args, kwargs)})")

        return hook

    return type("Listener", (pl.Callback,), {name: listener(name) for name in CALLBACK_HOOKS})()


def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe arguments: batches by content, outputs by loss, others by class or value."""
    return ", ".join(describe_one(value) for value in [*args, *kwargs.values()])


def describe_one(value: Any) -> str:
    if isinstance(value, int | float | str | None):
        return repr(value)
    if isinstance(value, Tensor):
        return f"{value.float().sum().item():.6f}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe_one, value))}]"
    if isinstance(value, dict) and "loss" in value:
        return f"loss {describe_one(value['loss'])}"
    if isinstance(value, pl.Trainer):
        return f"step {value.global_step} epoch {value.current_epoch}"
    return "" if callable(value) else type(value).__name__.removeprefix("Listening")


SITUATIONS: dict[str, dict[str, Any]] = {
    "plain": {"max_epochs": 2},
    "accumulation": {"max_epochs": 2, "accumulate_grad_batches": 3},
    "clipping": {"max_epochs": 1, "gradient_clip_val": 0.1},
    "sanity-check": {"max_epochs": 1, "num_sanity_val_steps": 2},
    "validation-within": {"max_epochs": 2, "val_check_interval": 2},
    "validation-by-steps": {"max_epochs": 2, "val_check_interval": 3, "check_val_every_n_epoch": None},
    "validation-rarely": {"max_epochs": 3, "check_val_every_n_epoch": 2},
    "max-steps": {"max_steps": 6, "max_epochs": -1},
    "min-steps": {"max_epochs": 1, "min_steps": 7},
    "limits": {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1, "log_every_n_steps": 2},
    "profiler": {"max_epochs": 1, "profiler": "simple"},
    "overfit": {"max_epochs": 2, "overfit_batches": 2},
    "fast-dev-run": {"fast_dev_run": 2},
    "barebones": {"max_epochs": 1, "barebones": True},
    "bf16": {"max_epochs": 1, "precision": "bf16-mixed"},
}


def record(
    trainer_class: type[pl.Trainer], strategy: str, listeners: str, options: dict[str, Any], manual: bool, stop: bool
) -> dict[str, Any]:
    torch.manual_seed(3)
    calls: list[str] = []
    module = Learner(manual)
    if "module" in listeners:
        hooks = [h for h in MODULE_HOOKS if not (manual and h in ("configure_gradient_clipping", "lr_scheduler_step"))]
        listen_in_module(module, calls, hooks)
    if stop:
        module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 3 else None  # type: ignore[method-assign]
    logger = Written()
    generous = {"log_every_n_steps": 1, "use_distributed_sampler": False, "logger": logger}
    settings = {**QUIET, **generous, **options}
    if options.get("barebones"):
        settings = {"accelerator": "cpu", "use_distributed_sampler": False, **options}
    callbacks = [listening_callback(calls)] if "callback" in listeners else None
    trainer = trainer_class(
        strategy=make_strategy(strategy, certificate="off"), devices=world_size(), callbacks=callbacks, **settings
    )
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=2), DataLoader(TensorDataset(x), batch_size=4))
    progress = trainer.fit_loop.state_dict()
    progress["state_dict"].clear()  # ours alone: the cursor and what was logged
    return {
        "calls": calls,
        "progress": progress,
        "logged": logger.rows,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "weights": {name: whole(value).tolist() for name, value in module.state_dict().items()},
    }


def record_both(strategy: str, listeners: str, options: dict[str, Any], manual: bool, stop: bool = False) -> Any:
    from trainwright.trainer.trainer import Trainer

    return [record(cls, strategy, listeners, options, manual, stop) for cls in (pl.Trainer, Trainer)]


def assert_same(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for i, (expected, found) in enumerate(zip(theirs["calls"], ours["calls"], strict=False)):
        before = "\n  ".join(ours["calls"][max(0, i - 5) : i])
        assert found == expected, f"call {i}, after\n  {before}"
    assert len(ours["calls"]) == len(theirs["calls"])
    for kind in ("progress", "logged", "metrics", "weights"):
        assert ours[kind] == theirs[kind], kind


@pytest.mark.sample(4)
@pytest.mark.parametrize("situation", list(SITUATIONS))
def test_hooks_are_called_in_lightnings_order(ranks, situation):
    # Where a hook is not overridden, the loop takes a shorter path.
    for listeners in ("callback", "module", "callback module", "none"):
        theirs, ours = ranks(record_both, 1, "single", listeners, SITUATIONS[situation], False)[0]
        assert listeners == "none" or len(theirs["calls"]) > 20
        assert_same(theirs, ours)


@pytest.mark.parametrize("situation", ["plain", "validation-within", "max-steps"])
def test_hooks_of_manual_optimization(ranks, situation):
    theirs, ours = ranks(record_both, 1, "single", "callback module", SITUATIONS[situation], True)[0]
    assert_same(theirs, ours)


@pytest.mark.parametrize("situation", ["plain", "accumulation"])
def test_hooks_when_the_user_ends_the_epoch(ranks, situation):
    theirs, ours = ranks(record_both, 1, "single", "callback", SITUATIONS[situation], False, stop=True)[0]
    assert_same(theirs, ours)


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("situation", ["plain", "accumulation", "clipping"])
def test_hooks_under_every_strategy(ranks, strategy, situation):
    for theirs, ours in ranks(record_both, 2, strategy, "callback module", SITUATIONS[situation], False):
        for kind in ("calls", "progress"):
            assert ours[kind] == theirs[kind], kind
