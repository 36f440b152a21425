"""Evaluation under data ranks: the batches, metrics and outputs of one process."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, get_worker_info
from torchmetrics import MeanSquaredError, MetricCollection, SpearmanCorrCoef, SumMetric

from tests.parity.harness import QUIET, make_trainer
from trainwright import DealtStream

SAMPLES, BATCH = 25, 4


class Rows(Dataset):
    """Samples with 1 to 3 valid targets of 3; a list of indices gives a batch."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(samples, 3, generator=generator)
        self.y = torch.randint(4, (samples, 3), generator=generator)
        for sample in range(samples):
            self.y[sample, 1 + sample % 3 :] = -100

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Stream(IterableDataset):
    """The same samples in order, split over workers as in PyTorch's documentation."""

    def __iter__(self) -> Any:
        worker, rows = get_worker_info(), Rows()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter([rows[index] for index in range(first, SAMPLES, step)])


class Averages:
    """A meter of the user's own, as many projects have."""

    def __init__(self) -> None:
        self.values: list[float] = []


class Seen(pl.Callback):
    """Collects outputs by itself."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("from_callback", torch.stack(self.outputs).square().mean().sqrt())
        self.outputs.clear()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(functional.relu(self.enter(x)))


class Evaluated(pl.LightningModule):
    """Metrics of every kind, most of which are no means over samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.net = nn.Linear(3, 12)
        self.metrics = MetricCollection([MeanSquaredError(squared=False), SpearmanCorrCoef()])
        self.count = SumMetric()
        self.losses: list[Tensor] = []
        self.by_loader: dict[int, list[Tensor]] = defaultdict(list)
        self.nested: list[list[int]] = [[], []]
        self.meter, self.ran, self.seen = Averages(), 0, set()
        self.register_buffer("batches", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return self.net(x).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        if isinstance(batch, dict):  # read side by side
            parts = [part for part in batch.values() if part is not None]
            batch = tuple(torch.cat([part[place] for part in parts]) for place in range(2))
        x, y = batch
        if x.ndim == 1:  # a single sample
            x, y = x[None], y[None]
        for layer in self.layers:
            x = layer(x)
        logits = self.net(x).unflatten(1, (4, 3))
        loss = functional.cross_entropy(logits, y, ignore_index=-100)
        self.log("loss", loss, batch_size=len(x))
        self.log("loss_synced", loss, sync_dist=True, batch_size=len(x))
        self.log("largest", loss, reduce_fx="max", batch_size=len(x))
        if batch_idx == 1:
            self.log("second", loss, batch_size=len(x))
        if (y != -100).sum() % 2:
            self.log("odd", loss, reduce_fx="min", batch_size=len(x))
        self.log("index", float(batch_idx), batch_size=1)
        self.metrics.update(logits.mean((1, 2)), x.mean(1))
        self.log_dict(self.metrics)
        self.count.update(torch.ones(len(x)))
        self.log("count", self.count)
        self.losses.append(loss)
        self.by_loader[dataloader_idx].append(loss)
        self.nested[dataloader_idx] += y[:, 0].tolist()
        self.meter.values.append(float(loss))
        self.ran += 1
        self.seen.add(batch_idx)
        self.batches += 1
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("rmse_of_list", torch.stack(self.losses).square().mean().sqrt())
        self.log("rmse_of_loader", torch.stack(self.by_loader[0]).square().mean().sqrt())
        order = torch.arange(1.0, 1 + len(self.nested[0]))
        self.log("in_order", (torch.tensor(self.nested[0]) * order).mean())
        self.losses.clear()
        self.by_loader = defaultdict(list)
        self.nested = [[], []]

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.losses.append(batch[0].mean())
        return batch_idx, batch[0]

    def on_predict_epoch_end(self) -> None:
        self.predicted = torch.stack(self.losses).tolist()
        self.losses.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loaders(kind: str) -> Any:
    rows = Rows()
    bulk = DataLoader(rows, sampler=BatchSampler(SequentialSampler(rows), BATCH, False), batch_size=None)
    return {
        "plain": lambda: DataLoader(rows, batch_size=BATCH),
        "shuffled": lambda: DataLoader(rows, batch_size=BATCH, sampler=list(reversed(range(SAMPLES)))),
        "fewer than ranks": lambda: DataLoader(Rows(5), batch_size=8),
        "drop_last": lambda: DataLoader(rows, batch_size=BATCH, drop_last=True),
        "batch sampler": lambda: DataLoader(rows, batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7, 8]]),
        "bulk": lambda: bulk,
        "single samples": lambda: DataLoader(rows, batch_size=None),
        "several": lambda: [DataLoader(rows, batch_size=BATCH), DataLoader(Rows(9), batch_size=3)],
        "cycled": lambda: CombinedLoader(
            {"a": DataLoader(rows, batch_size=BATCH), "b": DataLoader(Rows(9), batch_size=3)}, "max_size_cycle"
        ),
        "longest": lambda: CombinedLoader(
            {"a": DataLoader(rows, batch_size=BATCH), "b": DataLoader(Rows(9), batch_size=3)}, "max_size"
        ),
        "stream": lambda: DataLoader(Stream(), batch_size=BATCH),
        "stream, drop_last": lambda: DataLoader(Stream(), batch_size=BATCH, drop_last=True),
        "stream of batches": lambda: DataLoader([rows[:4], rows[4:7], rows[7:9]], batch_size=None),
        "dealt stream": lambda: DataLoader(DealtStream(rows[i] for i in range(SAMPLES)), batch_size=BATCH),
        "dealt stream, drop_last": lambda: DataLoader(
            DealtStream([rows[i] for i in range(SAMPLES)]), batch_size=BATCH, drop_last=True
        ),
    }[kind]()


MAP_STYLE = ["plain", "shuffled", "fewer than ranks", "drop_last", "batch sampler", "bulk", "single samples", "several"]
OTHERS = ["cycled", "longest", "stream", "stream, drop_last", "stream of batches", "dealt stream, drop_last"]


def evaluate(strategy: str, kind: str, limit: float, stages: str = "validate test") -> dict[str, Any]:
    """Return metrics logged under a strategy, or Lightning's Trainer on one process."""
    options: dict[str, Any] = {f"limit_{stage}_batches": limit for stage in ("val", "test", "predict")}
    if strategy == "lightning":
        trainer: Any = pl.Trainer(devices=1, **{**QUIET, **options})
    else:
        trainer = make_trainer(strategy, **options)
    trainer.callbacks.append(Seen())
    module, found = Evaluated(), {}
    for stage in stages.split():
        logged = getattr(trainer, stage)(module, loaders(kind), verbose=False)
        found[stage] = [{name: float(value) for name, value in each.items()} for each in logged]
        if stage == "validate":
            found["state"] = (module.ran, float(module.batches), len(module.meter.values), module.seen)
        found[f"{stage} number"] = [*(trainer.num_val_batches if stage == "validate" else trainer.num_test_batches)]
    return found


def evaluate_all(strategy: str, kinds: list[str]) -> dict[tuple[str, float], dict[str, Any]]:
    return {(kind, limit): evaluate(strategy, kind, limit) for kind in kinds for limit in (1.0, 3)}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("world_size", "strategy", "kinds"),
    [
        *((ranks, "ddp", kinds) for ranks in (2, 3) for kinds in (MAP_STYLE, OTHERS)),
        (2, "zero3", ["plain", "several", "cycled", "stream"]),
    ],
)
def test_metrics_are_those_of_one_process(
    ranks: Any, reference: Any, world_size: int, strategy: str, kinds: Any
) -> None:
    expected = reference(evaluate_all, "lightning", kinds)
    results = ranks(evaluate_all, world_size, strategy, kinds)
    for case, alone in expected.items():
        for found in (result[case] for result in results):
            for stage in ("validate", "test"):
                for logged, wanted in zip(found[stage], alone[stage], strict=True):
                    # Waves are counted where a forward pass is a collective, so that ranks take the same branches.
                    by_index = {"second", "index"} if strategy == "zero3" else set()
                    assert logged == pytest.approx(
                        {**wanted, **{name: logged[name] for name in wanted if name.split("/")[0] in by_index}},
                        rel=1e-5,
                    ), (case, stage)
                if strategy == "ddp":
                    assert found[f"{stage} number"] == alone[f"{stage} number"], case
        # A batch that a rank only runs along leaves nothing in the module.
        for kept in range(3):
            assert sum(result[case]["state"][kept] for result in results) == alone["state"][kept], case
        if strategy == "ddp":
            assert set().union(*(result[case]["state"][3] for result in results)) == alone["state"][3], case


def predict(strategy: str, kind: str) -> Any:
    trainer: Any = pl.Trainer(devices=1, **QUIET) if strategy == "lightning" else make_trainer(strategy)
    predictions = trainer.predict(module := Evaluated(), loaders(kind))
    return [[index, x.tolist()] for index, x in predictions], module.predicted


@pytest.mark.parametrize("kind", ["plain", "bulk", "stream"])
def test_predictions_and_lists_are_those_of_one_process(ranks: Any, reference: Any, kind: str) -> None:
    predictions, means = reference(predict, "lightning", kind)
    for found, listed in ranks(predict, 2, "ddp", kind):
        assert found == predictions
        assert listed == pytest.approx(means)


def fit(strategy: str, options: dict[str, Any]) -> dict[str, float]:
    """Return what a fit with a sanity check logs, under a layout with or without data ranks."""
    trainer = make_trainer(strategy, options, max_epochs=1, num_sanity_val_steps=2, limit_val_batches=5)
    trainer.fit(
        Evaluated(), DataLoader(Rows(24), batch_size=24 // trainer.strategy.ranks.num_data_ranks), loaders("plain")
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name not in ("second", "index")}


@pytest.mark.parametrize(("world_size", "options"), [(2, {"tensor": 2}), (4, {"shard": 2, "tensor": 2})])
def test_layouts_with_shared_samples(ranks: Any, reference: Any, world_size: int, options: dict[str, int]) -> None:
    expected = reference(fit, "single", {})
    for found in ranks(fit, world_size, "hybrid", options):
        assert found == pytest.approx(expected, rel=1e-5)


class Gathers(Evaluated):
    def on_validation_epoch_end(self) -> None:
        self.log("total", self.all_gather(torch.stack(self.losses)).sum())
        self.losses.clear()


def gathered(strategy: str) -> float:
    trainer = make_trainer(strategy, limit_val_batches=6)
    return float(trainer.validate(Gathers(), loaders("plain"), verbose=False)[0]["total"])


def test_lists_of_a_module_that_gathers_itself_are_left_alone(ranks: Any, reference: Any) -> None:
    assert ranks(gathered, 2, "ddp") == pytest.approx([reference(gathered, "single")] * 2)


def streams_side_by_side() -> str:
    loader = CombinedLoader([loaders("stream"), loaders("plain")], "max_size")
    with pytest.raises(ValueError, match="side by side") as error:
        make_trainer("ddp").validate(Evaluated(), loader, verbose=False)
    return str(error.value)


def test_streams_side_by_side_are_refused(ranks: Any) -> None:
    assert all('mode "sequential"' in text for text in ranks(streams_side_by_side, 2))
