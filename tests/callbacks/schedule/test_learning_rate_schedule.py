"""Configured learning rate schedules, step by step."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.parity.harness import QUIET
from trainwright import Trainer
from trainwright.callbacks.schedule.learning_rate_schedule import LearningRateSchedule, ScheduledRate
from trainwright.callbacks.schedule.schedules import OneCycle, RangeTest, Schedule, Warmup, WarmupCosine, WarmupDecay


def rates(schedule: Schedule, steps: int, base: float = 0.01) -> list[float]:
    return [schedule.rate(step, base, 0) for step in range(steps)]


@pytest.mark.parametrize(("schedule", "expected"), [
    # The lowest rate comes twice: DeepSpeed sets a rate before the first step and after each.
    (Warmup(4, 0.0, 1.0, "linear"), [0, 0, 0.25, 0.5, 0.75, 1, 1]),
    (Warmup(4, 0.0, 1.0), [0, 0, math.log(2) / math.log(4), math.log(3) / math.log(4), 1, 1]),
    (Warmup(0, 0.5, 1.0, "linear"), [0.5, 0.5, 0.75, 1]),
    (Warmup(2, 0.0, None, "linear"), [0, 0, 0.005, 0.01]),
    (WarmupDecay(2, 0.0, 1.0, "linear", 6), [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]),
    (
        WarmupCosine(2, 4, first_part=0.5, last_part=0.2, shape="linear"),
        [0, 0.005, 0.0075, 0.01 * (0.2 + 0.8 * 0.5), 0.002, 0.002],
    ),
    (OneCycle(0.0, 1.0, 2, decay_every=2, decay=1.0), [0, 0.5, 1, 0.5, 0, 0, 0]),
    (OneCycle(1.0, 2.0, 2, decay_every=2, decay=1.0), [1, 1.5, 2, 1.5, 1, 1 / 1.5, 0.5]),
    (OneCycle(0.0, 1.0, 4, up_stairs=2), [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0]),
    (RangeTest(1.0, every=2, growth=3.0), [1, 2.5, 4, 5.5]),
    (RangeTest(1.0, every=2, growth=3.0, staircase=True), [1, 1, 4, 4]),
], ids=str)  # fmt: skip
def test_rates(schedule: Schedule, expected: list[float]) -> None:
    assert rates(schedule, len(expected)) == pytest.approx(expected)


def test_cycled_momentum() -> None:
    cycle = OneCycle(0.0, 1.0, 2, lowest_momentum=0.8, highest_momentum=0.9)
    assert [cycle.betas(step, 0) for step in range(5)] == [
        pytest.approx(betas) for betas in [(0.8, 0.99), (0.85, 0.99), (0.8, 0.99), (0.85, 0.99), (0.9, 0.99)]
    ]
    assert OneCycle(0.0, 1.0, 2, cycle_momentum=False).betas(1, 0) is None


def test_invalid_schedules() -> None:
    with pytest.raises(ValueError, match="shape='cubic'"):
        Warmup(shape="cubic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="up_steps=0"):
        OneCycle(0.0, 1.0, 0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match=r"a list of 2 values for 1 parameter group"):
        ScheduledRate(optimizer, Warmup(2, lowest=[0.0, 1.0]))


class Module(pl.LightningModule):
    """Has its own schedule, and records the rate of each step."""

    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.count = optimizers
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.layer(batch).pow(2).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        made = [torch.optim.Adam(self.parameters(), lr=0.1) for _ in range(self.count)]
        return made, [torch.optim.lr_scheduler.StepLR(made[0], 1, 0.5)]


def trainer(max_steps: int, schedule: Schedule) -> Trainer:
    return Trainer(
        strategy="single", devices=1, max_steps=max_steps, callbacks=[LearningRateSchedule(schedule)], **QUIET
    )


def test_replaces_module_schedule_and_resumes() -> None:
    schedule = WarmupDecay(2, 0.0, 1.0, "linear", 6)
    data = DataLoader(torch.randn(8, 2), batch_size=1)  # type: ignore[arg-type]
    modules = []
    for _ in range(3):
        torch.manual_seed(0)
        modules.append(Module())
    whole, first, rest = modules
    trainer(6, schedule).fit(whole, data)
    assert whole.seen == pytest.approx(rates(schedule, 6))
    begun = trainer(3, schedule)
    begun.fit(first, data)
    begun.save_checkpoint(Path("saved"))
    trainer(6, schedule).fit(rest, data, ckpt_path="saved")
    assert first.seen + rest.seen == whole.seen
    assert torch.equal(rest.layer.weight, whole.layer.weight)


def test_several_optimizers() -> None:
    module = Module(optimizers=2)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="2 optimizers"):
        trainer(1, Warmup()).fit(module, DataLoader(torch.randn(2, 2)))  # type: ignore[arg-type]
