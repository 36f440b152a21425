"""BatchNorm: one rule for running statistics under all strategies, and statistics over all ranks on CPUs."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer

STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("zero1", {}),
    ("zero2", {}),
    ("zero3", {}),
    ("hybrid", {"replicate": 2, "stage": 1}),
]


class Net(pl.LightningModule):
    """Keeps running statistics as hooks and evaluation steps see them."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6, momentum=momentum), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1)
        )
        self.seen: list[list[float]] = []

    def _see(self) -> None:
        self.seen.append(self.state_dict()["net.1.running_mean"].tolist())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._see()
        self.log("val_loss", self.net(batch).square().mean())

    def on_validation_start(self) -> None:
        self._see()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._see()

    def on_train_epoch_end(self) -> None:
        self._see()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def samples(count: int) -> Tensor:
    scales = torch.linspace(0.5, 3, count)[:, None, None]
    return torch.randn(count, 2, 6, generator=torch.Generator().manual_seed(0)) * scales + 5


def values_seen(strategy: str, options: dict[str, Any], averages: bool) -> list[Any]:
    module, data = Net(), samples(32)
    callbacks = [WeightAveraging()] if averages else []
    trainer = make_trainer(strategy, options, max_epochs=2, global_batch_size=8, callbacks=callbacks)
    trainer.fit(module, DataLoader(data[:24], batch_size=4), DataLoader(data[24:], batch_size=4))
    trainer.save_checkpoint("saved.ckpt")
    after = {name: value.tolist() for name, value in module.state_dict().items() if "running" in name}
    logged = trainer.callback_metrics["val_loss"].item()
    trainer.validate(module, DataLoader(data[24:], batch_size=4), verbose=False)
    return [module.seen, after, [logged, trainer.callback_metrics["val_loss"].item()][: 1 if averages else 2]]


@pytest.mark.sample(2)
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize(("strategy", "options"), STRATEGIES)
def test_ranks_evaluate_and_save_the_same_statistics(
    ranks: Any, strategy: str, options: dict[str, Any], averages: bool
) -> None:
    first, second = ranks(values_seen, 2, strategy, options, averages)
    assert first == second
    if not averages:
        assert first[2][0] == pytest.approx(first[2][1], rel=1e-6)
        assert first[1] == ranks(values_seen, 2, "ddp", {}, False)[0][1]


def trained(strategy: str, options: dict[str, Any], batch_size: int, momentum: float | None = 0.1) -> list[Any]:
    module = Net(momentum)
    trainer = make_trainer(
        strategy, options, max_epochs=2, global_batch_size=8, sync_batchnorm=True, limit_val_batches=0
    )
    trainer.fit(module, DataLoader(samples(21), batch_size=batch_size))
    return [value.tolist() for value in module.state_dict().values()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(("strategy", "options"), STRATEGIES)
def test_synchronized_statistics_are_those_of_the_whole_batch(
    ranks: Any, strategy: str, options: dict[str, Any], momentum: float | None
) -> None:
    (expected,) = ranks(trained, 1, "single", {}, 8, momentum)
    for found in ranks(trained, 2, strategy, options, 4, momentum):
        for value, one in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(value), torch.tensor(one), rtol=1e-5, atol=1e-5)


def test_a_rank_without_samples_adds_nothing_to_statistics(ranks: Any) -> None:
    (expected,) = ranks(trained, 1, "single", {}, 8)  # the last step has 5 samples
    for found in ranks(trained, 4, "zero2", {}, 2):
        for value, one in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(value), torch.tensor(one), rtol=1e-5, atol=1e-5)


class Activated(nn.BatchNorm1d):
    """BatchNorm with an activation."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def refusal() -> str:
    module = Net()
    module.net[1] = Activated(6)
    with pytest.raises(ValueError, match="Activated") as caught:
        make_trainer("ddp", {}, max_steps=1, sync_batchnorm=True).fit(module, DataLoader(samples(8), batch_size=4))
    return str(caught.value)


def test_a_layer_that_adds_to_batch_norm_is_refused(ranks: Any) -> None:
    assert "the forward of net.1 (Activated)" in ranks(refusal, 2)[0]


class Caching(Net):
    """Caches what depends on the batches of a rank, and sets learning rates that do."""

    def __init__(self, by_rank: bool) -> None:
        super().__init__()
        self.by_rank = by_rank
        self.register_buffer("cache", None, persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.cache = torch.ones(2 + self.global_rank)
        if self.by_rank:
            self.optimizers().param_groups[0]["lr"] = 0.01 * (1 + self.global_rank)
        return super().training_step(batch, batch_idx)


def shared_of_unequal(strategy: str) -> str:
    module = Caching(by_rank=False)
    make_trainer(strategy, {}, max_epochs=1).fit(module, DataLoader(samples(8), batch_size=4))
    assert len(module.cache) == 2 + module.global_rank
    with pytest.raises(RuntimeError, match="learning rates") as caught:
        make_trainer(strategy, {}, max_epochs=1).fit(Caching(by_rank=True), DataLoader(samples(8), batch_size=4))
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_caches_stay_and_different_learning_rates_are_refused(ranks: Any, strategy: str) -> None:
    assert "[0.02] and data rank 0 [0.01]" in ranks(shared_of_unequal, 2, strategy)[0]
