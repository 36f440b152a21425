"""Asynchronous workers lease the samples of an epoch, and together read each once at any speeds."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from tests.parity.harness import QUIET
from trainwright import Trainer
from trainwright.core.run.traits import Traits
from trainwright.strategies.data.ddp import DDPStrategy
from trainwright.strategies.parameter_server.strategy import ParameterServerStrategy
from trainwright.trainer.data.reading import dealer_of

SAMPLES = 107
# Hooks of two epochs.
TWO_EPOCHS = ["start 0", "validate", "end 0", "start 1", "validate", "end 1"]


class Alone(DDPStrategy):
    """Ranks that share samples but exchange no gradients."""

    def __init__(self, guarantee: str = "at_least_once", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.traits = Traits(steps_are_collective=False, leases_samples=guarantee)

    def configure_ddp(self) -> None:
        pass

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor


class Numbers(Dataset):
    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))

    def __len__(self) -> int:
        return SAMPLES


class Reader(pl.LightningModule):
    """Records what it reads; the first rank waits before its second step until another has made ``ahead`` steps."""

    def __init__(self, ahead: int = 0) -> None:
        super().__init__()
        self.ahead = ahead
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.read: dict[int, list[int]] = defaultdict(list)
        self.gradients: list[float] = []
        self.rates: list[float] = []
        self.hooks: list[str] = []
        self.micro_batches = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.micro_batches += 1
        self.log_mean(batch)
        if self.global_rank == 0 and self.micro_batches == 2 and self.ahead:
            _get_default_store().get("ahead")
        (loader,) = self.trainer.fit_loop._combined_loader.flattened
        if not dealer_of(loader).is_padding(batch_idx):
            self.read[self.current_epoch] += batch.int().tolist()
        return self.weight * batch.mean()

    def log_mean(self, batch: Tensor) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(self.weight.grad.item())
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 1 and self.micro_batches == self.ahead:
            _get_default_store().set("ahead", "now")

    def on_train_epoch_start(self) -> None:
        self.hooks.append(f"start {self.current_epoch}")

    def on_train_epoch_end(self) -> None:
        self.hooks.append(f"end {self.current_epoch}")

    def on_validation_epoch_start(self) -> None:
        self.hooks.append("validate")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=1024.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Logging(Reader):
    """Logs values of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def log_mean(self, batch: Tensor) -> None:
        self.log("mean", batch.mean(), on_step=False, on_epoch=True, batch_size=len(batch))
        self.log("largest", batch.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.metric(batch)
        self.log("metric", self.metric, on_step=False, on_epoch=True)


def fit(
    micro: int, workers: int = 0, ahead: int = 0, strategy: Any = None, ckpt: str | None = None, save: bool = False,
    drop_last: bool = False, guarantee: str = "at_least_once", logs: bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    module = Logging() if logs else Reader(ahead)
    if strategy == "servers":
        strategy = ParameterServerStrategy("async", leases=guarantee)
    trainer = Trainer(
        strategy=Alone(guarantee) if strategy is None else strategy,
        devices=dist.get_world_size(),
        data_seed=3,
        **{**QUIET, "max_epochs": 1, "limit_val_batches": 0, **options},
    )
    loader = DataLoader(Numbers(), batch_size=micro, shuffle=True, num_workers=workers, drop_last=drop_last)
    trainer.fit(module, loader, DataLoader(Numbers(), batch_size=32), ckpt_path=ckpt)
    if save:
        trainer.save_checkpoint(save)
    return {
        "read": dict(module.read),
        "gradients": module.gradients,
        "rates": module.rates,
        "hooks": module.hooks,
        "steps": module.micro_batches,
        "weight": module.weight.item(),
        "global_step": trainer.global_step,
        "estimated": module.estimated,
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def all_read(results: list[dict[str, Any]], epoch: int = 0) -> Counter[int]:
    return Counter(index for result in results for index in result["read"].get(epoch, []))


def test_a_fast_worker_reads_more_and_each_sample_is_read_once(ranks: Any) -> None:
    slow, fast = ranks(fit, 2, 4, ahead=20, global_batch_size=8)
    assert all_read([slow, fast]) == Counter(range(SAMPLES))
    assert slow["steps"] + fast["steps"] == 27
    assert fast["steps"] >= 20
    # Equal shares of an epoch are what others count; schedulers count global batches' worth, on every worker.
    assert slow["estimated"] == fast["estimated"] == 14
    assert fast["rates"][-1] < 1024 / 2**9


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (3, 0), (2, 2)])
def test_epochs_with_accumulation_validation_and_a_remainder(ranks: Any, world: int, workers: int) -> None:
    results = ranks(fit, world, 3, workers, global_batch_size=12 * world, max_epochs=2, limit_val_batches=1.0)
    for epoch in (0, 1):
        assert all_read(results, epoch) == Counter(range(SAMPLES)), epoch
    # Eight chunks of twelve samples and one of eleven, each four micro-batches and one step.
    assert sum(result["steps"] for result in results) == 2 * 9 * 4
    assert sum(len(result["gradients"]) for result in results) == 2 * 9
    for result in results:
        assert result["hooks"] == TWO_EPOCHS
    if world == 1:
        order = results[0]["read"]
        assert order[0] != order[1]
        # The gradient of a step is the mean over its samples, the last one's too.
        steps = [order[0][first : first + 12] for first in range(0, SAMPLES, 12)]
        assert results[0]["gradients"][:9] == pytest.approx([sum(step) / len(step) for step in steps])
        assert results[0]["rates"][:9] == [1024 / 2**step for step in range(9)]
        assert results[0]["read"][0] == ranks(fit, 1, 12, strategy="single")[0]["read"][0]


def test_workers_of_a_parameter_server_lease(ranks: Any) -> None:
    options: dict[str, Any] = {"global_batch_size": 8, "max_epochs": 2, "limit_val_batches": 1.0}
    slow, fast = ranks(fit, 2, 4, ahead=20, strategy="servers", **options)
    for epoch in (0, 1):
        assert all_read([slow, fast], epoch) == Counter(range(SAMPLES))
    assert fast["steps"] >= 20
    for result in (slow, fast):
        assert result["hooks"] == TWO_EPOCHS
    # Both have the servers' parameters at the end, and count the same steps.
    assert slow["weight"] == fast["weight"] != 0
    assert slow["global_step"] == fast["global_step"] == 2 * SAMPLES // 8


@pytest.mark.parametrize("profiler", [None, "simple"], ids=["lean loop", "Lightning's loop"])
def test_a_worker_that_finds_nothing_ends_the_epoch_with_the_others(ranks: Any, profiler: str | None) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 1.0, "profiler": profiler}
    results = ranks(fit, 3, 64, strategy="servers", logs=True, **options)  # two chunks for three
    assert sum(result["steps"] for result in results) == 4
    assert min(result["steps"] for result in results) < 2
    for epoch in (0, 1):
        assert all_read(results, epoch) == Counter(range(SAMPLES))
    for result in results:
        assert result["hooks"] == TWO_EPOCHS
        assert result["logged"] == {"mean": 53.0, "largest": 106.0, "metric": 53.0}
        assert result["weight"] == results[0]["weight"] != 0
        assert result["global_step"] == results[0]["global_step"]


def test_limits_are_of_all_workers_together(ranks: Any) -> None:
    results = ranks(fit, 2, 4, ahead=6, limit_train_batches=5)
    assert sum(all_read(results).values()) == max(1, len(all_read(results))) == 40
    assert results[1]["steps"] >= 6
    results = ranks(fit, 2, 4, ahead=20, global_batch_size=8, max_steps=17, max_epochs=-1)
    assert all_read(results) == Counter(range(SAMPLES))
    assert len(all_read(results, 1)) == sum(all_read(results, 1).values()) == 17 * 8 - SAMPLES + 3
    results = ranks(fit, 2, 4, drop_last=True)
    assert sum(all_read(results).values()) == len(all_read(results)) == 104


def test_a_run_resumes_with_other_workers_and_strategies(ranks: Any) -> None:
    legs: list[tuple[int, int, Any, int | None]] = [
        (3, 4, None, 2),
        (1, 6, None, 4),
        (2, 6, "ddp", 6),
        (2, 3, "servers", None),
    ]
    read: Counter[int] = Counter()
    for number, (world, micro, strategy, steps) in enumerate(legs):
        options: dict[str, Any] = {"max_steps": steps} if steps else {"max_epochs": 2}
        results = ranks(
            fit, world, micro, strategy=strategy, ckpt=f"../leg{number - 1}.ckpt" if number else None,
            save=f"../leg{number}.ckpt", global_batch_size=12, **options,
        )  # fmt: skip
        read += all_read(results)
        if steps:
            assert sum(read.values()) == len(read) == steps * 12, number
    assert read == Counter(range(SAMPLES))
    assert all_read(results, 1) == Counter(range(SAMPLES))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guarantee": "twice"}, r"leases='twice' \(allowed: 'at_least_once', 'at_most_once'\)"),
        ({"limit_train_batches": 0.5}, "limit_train_batches=0.5: set a whole number"),
        (
            {"val_check_interval": 3, "limit_val_batches": 1.0},
            "val_check_interval=3: workers synchronize only at the end",
        ),
        ({"data_partition": "range"}, "data_partition='range'"),
        ({"uneven_steps": True}, "uneven_steps=True"),
    ],
)
def test_runs_without_leases(ranks: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=f"ValueError: The samples of this run cannot be leased: {message}"):
        ranks(fit, 1, 4, **options)
