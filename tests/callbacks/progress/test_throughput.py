from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.callbacks.modules import Clock, Regression, loader, train
from tests.parity.layout_modules import LENGTH, VOCABULARY, make_module
from trainwright import Trainer
from trainwright.callbacks import windows
from trainwright.callbacks.progress.throughput import Throughput, num_samples

STEP = 0.5  # seconds, with exact sums


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(windows, "time", made)
    return made


class Slow(Regression):
    """Steps and validation batches of known length."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += STEP
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 5 * STEP


def test_window_rates(clock: Clock) -> None:
    watched = Throughput(every_n_steps=4)
    _, written = train(watched, module=Slow(clock), max_steps=12, data=loader(96, batch_size=8))
    assert written.column("step_seconds") == dict.fromkeys((3, 7, 11), STEP)
    assert written.column("samples_per_second") == dict.fromkeys((3, 7, 11), 8 / STEP)
    assert written.column("pixels_per_second") == dict.fromkeys((3, 7, 11), 4 * 8 / STEP)
    assert watched.rate == (4 * 8 / STEP, "pixels")


def test_validation_is_excluded(clock: Clock) -> None:
    options = {"max_steps": 8, "val_check_interval": 2, "data": loader(32), "val_data": loader(8)}
    _, written = train(Throughput(4), module=Slow(clock), **options)
    assert written.column("step_seconds") == dict.fromkeys((3, 7), STEP)


def test_accumulation(clock: Clock) -> None:
    _, written = train(
        Throughput(2), module=Slow(clock), max_steps=4, accumulate_grad_batches=3, data=loader(48, batch_size=4)
    )
    assert written.column("step_seconds")[3] == 3 * STEP
    assert written.column("samples_per_second")[3] == 12 / (3 * STEP)


def test_arguments_override_module_attributes() -> None:
    train(watched := Throughput(2, unit="values", units_per_sample=5), max_steps=4)
    assert "values_per_second" in watched.latest
    assert "pixels_per_second" not in watched.latest


@pytest.mark.parametrize(("batch", "samples"), [
    (torch.zeros(3, 5), 3),
    (torch.tensor(1.0), 1),
    ([torch.zeros(4), torch.zeros(4)], 4),
    ({"name": "x", "inputs": {"ids": torch.zeros(6, 2)}}, 6),
    (("a", "b"), 0),
    (None, 0),
])  # fmt: skip
def test_num_samples(batch: Any, samples: int) -> None:
    assert num_samples(batch) == samples


def of_ranks() -> dict[str, float]:
    train(watched := Throughput(3), kind=Trainer, strategy="ddp", max_steps=4, data=loader(32, batch_size=4))
    return watched.latest


def test_samples_of_all_ranks(ranks: Callable[..., list[Any]]) -> None:
    for latest in ranks(of_ranks, 2):
        assert latest["samples_per_second"] * latest["step_seconds"] == pytest.approx(8)


def of_experts(strategy: str) -> dict[str, float]:
    """Return the logged balance of a mixture of experts."""
    tokens = torch.randint(VOCABULARY, (16, LENGTH), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader([{"tokens": each} for each in tokens], batch_size=4)
    options: Any = {"module": make_module("mixtral"), "data": data, "strategy": strategy, "max_steps": 2}
    _, written = train(Throughput(2), kind=Trainer, **options)
    names = ("expert_imbalance", "rank_imbalance", "busiest_expert")
    return {name: value for _, row in written.rows for name, value in row.items() if name in names}


def test_expert_balance(ranks: Callable[..., list[Any]]) -> None:
    balance = ranks(of_experts, 2, "expert")[0]
    assert balance["expert_imbalance"] >= balance["rank_imbalance"] >= 1.0
    assert 0.25 <= balance["busiest_expert"] <= 1.0
    assert ranks(of_experts, 2, "ddp")[0] == {}
