"""Schedulers, early stopping and logged means continue over a resume as in an uninterrupted run."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from tests.parity.harness import Saver, make_trainer, world_size
from trainwright.trainer.loop import remembered_logs
from trainwright.trainer.loop.remembered_logs import redistribute

SAMPLES, BATCH = 24, 4  # six steps an epoch


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int, seed: int) -> None:
        self.x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum().sin()


class Net(pl.LightningModule):
    """Dropout shows random numbers that were drawn too often or too rarely."""

    def __init__(self, kind: str = "adam") -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.metric = torchmetrics.MeanMetric()
        self.metric.persistent(True)
        self.rows: list[Any] = []
        self.ends: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.metric(loss)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.log("train", loss, on_step=True, on_epoch=True)
        self.log("worst", loss, on_step=False, on_epoch=True, reduce_fx="max")
        if batch_idx == 0:
            self.log("first", loss.detach(), on_step=False, on_epoch=True)
        optimizers: Any = self.trainer.optimizers
        self.rows.append((self.current_epoch, batch_idx, loss.item(), optimizers[0].param_groups[0]["lr"]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))
        self.rows.append(("validation", self.trainer.global_step))

    def on_train_epoch_end(self) -> None:
        self.ends.append((self.current_epoch, {k: v.item() for k, v in self.trainer.callback_metrics.items()}))

    def configure_optimizers(self) -> Any:
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        if not self.kind.startswith("plateau"):
            return optimizer
        _, interval, monitor = self.kind.split()
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": monitor, "interval": interval},
        }


class CountingSaver(Saver):
    """Knows how much of the records of the module was there when it saved."""

    rows = ends = 0

    def save(self, trainer: pl.Trainer, module: Any) -> None:
        super().save(trainer, module)
        self.rows, self.ends = len(module.rows), len(module.ends)


def fit(module: Net, callbacks: list[Any], resume: str | None = None, **options: Any) -> Net:
    options = {"max_steps": 20, "data_seed": 3, **options}
    trainer = make_trainer(
        "ddp" if world_size() > 1 else "single",
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        **options,
    )
    train = DataLoader(Points(SAMPLES, 0), batch_size=BATCH // world_size(), shuffle=True)
    trainer.fit(module, train, DataLoader(Points(8, 1), batch_size=4), ckpt_path=resume)
    return module


def assert_resumes(
    path: str, hook: str, after: int, kind: str, watchers: Callable[[], list[Any]] = list, **options: Any
) -> None:
    """A run that is resumed in another module computes, logs and schedules what the one that saved did."""
    torch.manual_seed(5)
    saver = CountingSaver(path, hook, after)
    whole = fit(Net(kind), [*watchers(), saver], **options)
    assert saver.rows
    torch.manual_seed(6)
    resumed = fit(Net(kind), watchers(), path, **options)
    assert resumed.rows == whole.rows[saver.rows :]
    assert resumed.ends == whole.ends[saver.ends :]
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


# In the middle of an epoch, in its last batch, after its validation, and in its last hook.
POINTS = [("batch", 4), ("batch", 6), ("validation", 6), ("epoch", 6), ("batch", 12), ("epoch", 12)]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("hook", "after"), POINTS)
def test_a_scheduler_on_a_plateau_and_early_stopping(tmp_path: Path, hook: str, after: int) -> None:
    """Both depend on values logged before the run was saved."""
    watchers: Callable[[], list[Any]] = lambda: [  # noqa: E731
        EarlyStopping("val", patience=3),
        EarlyStopping("train_epoch", patience=5),
    ]
    assert_resumes(str(tmp_path / "state"), hook, after, "plateau epoch val", watchers)


@pytest.mark.parametrize("after", [4, 6])
def test_a_scheduler_that_steps_by_the_loss_of_a_step(tmp_path: Path, after: int) -> None:
    assert_resumes(str(tmp_path / "state"), "batch", after, "plateau step train_step", max_steps=9)


@pytest.mark.parametrize(("hook", "after"), [("batch", 2), ("validation", 2), ("batch", 6)])
def test_validation_within_an_epoch_comes_once(tmp_path: Path, hook: str, after: int) -> None:
    assert_resumes(str(tmp_path / "state"), hook, after, "plateau epoch val", val_check_interval=2, max_steps=9)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("hook", "after"), [("batch", 9), ("epoch", 12)])
def test_averaging_of_weights_within_an_epoch(tmp_path: Path, hook: str, after: int) -> None:
    watchers: Callable[[], list[Any]] = lambda: [  # noqa: E731
        StochasticWeightAveraging(1e-3, swa_epoch_start=2, annealing_epochs=1)
    ]
    assert_resumes(str(tmp_path / "state"), hook, after, "adam", watchers, max_steps=-1, max_epochs=4)


def test_an_optimizer_that_keeps_lists(tmp_path: Path) -> None:
    assert_resumes(str(tmp_path / "state"), "batch", 4, "lbfgs", max_steps=8)


def test_parameters_of_64_bits(tmp_path: Path) -> None:
    assert_resumes(str(tmp_path / "state"), "batch", 4, "adam", precision="64-true", max_steps=8)


class MakesLoaders(pl.LightningDataModule):
    """Data of its own for each epoch in which loaders are made."""

    def __init__(self) -> None:
        super().__init__()
        self.made_in: list[tuple[str, int]] = []

    def _loader(self, kind: str) -> DataLoader[Any]:
        assert self.trainer is not None
        self.made_in.append((kind, self.trainer.current_epoch))
        return DataLoader(Points(SAMPLES, self.trainer.current_epoch), batch_size=BATCH)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val")


class KeepsValues(pl.Callback):
    def __init__(self) -> None:
        self.values: dict[tuple[int, str], float] = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.values |= {(trainer.current_epoch, name): float(v) for name, v in trainer.callback_metrics.items()}


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize(("hook", "after"), [("epoch", 3), ("epoch", 6), ("batch", 9)])
def test_a_resumed_run_reads_the_loaders_of_the_last_reload(tmp_path: Path, hook: str, after: int, every: int) -> None:
    path = str(tmp_path / "state")
    made, values, weights = [], [], []
    for callbacks, resume in (([Saver(path, hook, after)], None), ([], path)):
        data, kept = MakesLoaders(), KeepsValues()
        torch.manual_seed(5)
        trainer = make_trainer(
            "single",
            callbacks=[*callbacks, kept],
            enable_checkpointing=bool(callbacks),
            reload_dataloaders_every_n_epochs=every,
            max_epochs=5,
        )
        trainer.fit(module := Net(), datamodule=data, ckpt_path=resume)
        made.append(data.made_in)
        values.append(kept.values)
        weights.append(list(module.parameters()))
    assert set(made[1]) <= set(made[0])
    assert values[1].items() <= values[0].items()
    for whole, resumed in zip(*weights, strict=True):
        assert torch.equal(whole, resumed)


def mean_of_epoch(path: str, saves: bool, most_logged: int = remembered_logs.MOST_LOGGED) -> dict[str, float]:
    torch.manual_seed(5)
    module = Net()
    module.net[2] = nn.Identity()
    with mock.patch.object(remembered_logs, "MOST_LOGGED", most_logged):
        fit(module, [Saver(path, "batch", 4)] if saves else [], None if saves else path, max_steps=6)
    return module.ends[0][1]


def _record(state: Path) -> str:
    return next(name for name in zipfile.ZipFile(state).namelist() if name.endswith("state.json"))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("before", "after", "most_logged"), [(1, 2, 256), (2, 1, 256), (2, 2, 256), (2, 1, 1), (2, 2, 1)]
)
def test_means_of_an_epoch_continue_on_other_ranks(
    ranks: Any, tmp_path: Path, before: int, after: int, most_logged: int
) -> None:
    whole = ranks(mean_of_epoch, before, str(tmp_path / "state"), True, most_logged, init_group=before > 1)
    state = tmp_path / "state"  # one file under single and ddp, which holds the same records as a folder
    is_file = state.is_file()
    text = zipfile.ZipFile(state).read(_record(state)) if is_file else (state / "state.json").read_bytes()
    kept = json.loads(text)["loops"]["fit_loop"]["state_dict"]["logged"]
    assert len(kept) == (1 if before > most_logged else before)
    found = ranks(mean_of_epoch, after, str(tmp_path / "state"), False, init_group=after > 1)
    for one in found:
        for name in ("train_epoch", "worst") if before == after else ("train_epoch",):
            assert one[name] == pytest.approx(whole[0][name], rel=1e-5)


@pytest.mark.parametrize("ranks_now", [1, 2, 3])
def test_collected_logs_are_redistributed(ranks_now: int) -> None:
    def entry(reduce: str, value: float, count: float | None, **options: Any) -> dict[str, Any]:
        return {"fx": "f", "name": reduce, "metric": None, "rank_zero_only": False, "reduce": reduce, **options} | {
            "value": value,
            "count": count,
        }

    saved = [
        [entry("mean", 6.0, 4.0), entry("sum", 3.0, None), entry("max", 1.0, None), entry("min", 1.0, None)],
        [entry("mean", 2.0, 3.0), entry("sum", 5.0, None), entry("max", 7.0, None), entry("min", -1.0, None)],
    ]
    saved[0].append(entry("mean", 9.0, 1.0, name="first alone", rank_zero_only=True))
    shares = [{e["name"]: e for e in redistribute(saved, rank, ranks_now)} for rank in range(ranks_now)]
    assert sum(share["mean"]["value"] for share in shares) == pytest.approx(8)
    assert sum(share["mean"]["count"] for share in shares) == pytest.approx(7)
    assert sum(share["sum"]["value"] for share in shares) == pytest.approx(8)
    assert max(share["max"]["value"] for share in shares) == 7
    assert min(share["min"]["value"] for share in shares) == -1
    assert [share["first alone"]["value"] for share in shares if "first alone" in share] == [9.0]


class Blocks(Net):
    """Without dropout, and with layers that tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 1)))


def average(path: str, saves: bool, options: dict[str, Any] | None) -> dict[str, Tensor]:
    torch.manual_seed(5 if saves else 6)
    trainer = make_trainer(
        "single" if options is None else "hybrid",
        options,
        callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1), *([Saver(path, "batch", 8)] if saves else [])],
        enable_checkpointing=saves,
        max_epochs=3,
        data_seed=3,
    )
    trainer.fit(Blocks(), DataLoader(Points(SAMPLES, 0), batch_size=BATCH), ckpt_path=None if saves else path)
    return {name: value.clone() for name, value in trainer.strategy.whole_parameters()}


def test_an_average_of_split_weights_is_saved_whole(ranks: Any, tmp_path: Path) -> None:
    split = {"tensor": 2, "shard": 1, "plan": {"tensor": {"net.1.0": "colwise", "net.1.2": "rowwise"}}}
    path = str(tmp_path / "state")
    whole = ranks(average, 2, path, True, split)
    again = ranks(average, 2, path, False, split)
    (alone,) = ranks(average, 1, path, False, None, init_group=False)
    for found in (*again, alone):
        for name, value in whole[0].items():
            torch.testing.assert_close(found[name], value, msg=name)


class Frozen(Net):
    def configure_optimizers(self) -> Any:
        self.net[0].requires_grad_(False)
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_parameters_frozen_since_are_warned_about(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = str(tmp_path / "state")
    fit(Net(), [Saver(path, "batch", 4)], max_steps=4)
    fit(Net(), [], path, max_steps=6)
    assert not [warning for warning in recwarn if "frozen now" in str(warning.message)]
    with pytest.warns(UserWarning, match=r"2 parameter\(s\) that are frozen now: net.0.bias, net.0.weight"):
        fit(Frozen(), [], path, max_steps=6)
