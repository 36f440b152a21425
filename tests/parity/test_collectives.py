"""Collectives of user code run over the data ranks, under every layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from torchmetrics.utilities.distributed import gather_all_tensors

from tests.parity.harness import differences, make_trainer
from tests.parity.layout_modules import VOCABULARY, LanguageModel
from tests.parity.layouts import Texts, WholeRecorder

# Each layout is compared with DDP over as many data ranks.
DDP: dict[str, Any] = {"strategy": "ddp"}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tensor": (2, 1, {"tensor": 2, "shard": 1}),
    "context": (2, 1, {"context": 2, "shard": 1}),
    "pipeline": (2, 1, {"pipeline": 2, "shard": 1}),
    "tensor x shard": (4, 2, {"tensor": 2, "shard": 2}),
    "pipeline x replicate, zbv": (4, 2, {"pipeline": 2, "replicate": 2, "shard": 1, "schedule": "zbv"}),
}


class Watcher(pl.Callback):
    """A metric outside of the module."""

    def __init__(self) -> None:
        self.batches = SumMetric()
        self.found = 0.0

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.batches.update(len(batch["tokens"]))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.found = self.batches.compute().item()
        self.batches.reset()


class Asks(LanguageModel):
    """Runs collectives wherever people do."""

    def __init__(self, network: str) -> None:
        super().__init__(network)
        self.samples = SumMetric()
        self.several = MetricCollection([MulticlassAccuracy(VOCABULARY), MulticlassConfusionMatrix(VOCABULARY)])
        self.logged = MeanMetric()
        self.validated = MulticlassConfusionMatrix(VOCABULARY)
        self.hidden = {"list": [MeanMetric()]}
        self.late: Metric | None = None
        self.outputs: list[Tensor] = []
        self.found: dict[str, Any] = {}

    def _keep(self, name: str, value: Any) -> None:
        self.found.setdefault(name, []).append(value.tolist() if isinstance(value, Tensor) else value)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens = batch["tokens"]
        self.trainer.strategy.barrier()
        logits = self(tokens[:, :-1])
        ours = logits.float().mean(1)
        theirs = self.all_gather(ours, sync_grads=True).flatten(0, 1)
        self.trainer.strategy.barrier()
        first = self.trainer.strategy.broadcast(tokens[0].sum().item())
        assert first == self.all_gather(tokens[0].sum())[0].item()
        total = torch.tensor(float(len(tokens)))
        dist.all_reduce(total)
        dist.broadcast(total, src=0)
        assert total.item() == len(tokens) * dist.get_world_size()
        assert self.trainer.strategy.reduce(torch.tensor(len(tokens)), reduce_op="avg").item() == len(tokens)
        self.samples.update(len(tokens))
        self.several.update(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.logged.update(tokens.float())
        self.log("logged", self.logged, on_step=False, on_epoch=True)
        self.log("synced", logits.square().mean(), sync_dist=True)
        self.log("largest", self.trainer.strategy.reduce(tokens.amax().float(), reduce_op="max"), reduce_fx="max")
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + theirs.square().mean()

    def on_train_epoch_end(self) -> None:
        self._keep("trained on", self.samples.compute())
        self._keep("trained on", self.samples.compute())
        self._keep("trained", {name: value.tolist() for name, value in self.several.compute().items()})

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        tokens = batch["tokens"]
        logits = self(tokens[:, :-1])
        self.late = self.late or SumMetric()
        self.late.update(len(tokens))
        self.validated.update(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.hidden["list"][0].update(tokens.float())
        self.log("validated", self.late, on_epoch=True, metric_attribute="late")
        self.outputs.append(tokens[:, 0])

    def on_validation_epoch_end(self) -> None:
        self._keep("confusion", self.validated.compute())
        self._keep("mean", self.hidden["list"][0].compute())
        self._keep("firsts", sorted(torch.cat(gather_all_tensors(torch.cat(self.outputs))).tolist()))
        self.outputs.clear()
        self.validated.reset()


def train(options: dict[str, Any], data_ranks: int, validated: int) -> tuple[Any, dict[str, Any]]:
    recorder, watcher = WholeRecorder(), Watcher()
    usual = Metric.sync
    torch.manual_seed(3)
    module = Asks("gpt-untied")
    strategy = options.pop("strategy", "hybrid")
    trainer = make_trainer(strategy, options, max_epochs=2, callbacks=[recorder, watcher])
    trainer.fit(module, DataLoader(Texts(16), batch_size=8 // data_ranks), DataLoader(Texts(validated), batch_size=2))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert Metric.sync is usual
    return recorder.record, {**module.found, **logged, "watched": watcher.found}


@pytest.fixture(scope="module")
def under_ddp(pool: Any) -> Any:
    """Return the results of DDP by number of ranks, cached."""
    return cache(lambda data_ranks: pool.run(train, data_ranks, DDP, data_ranks, 9)[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_collectives_of_users_run_over_data_ranks(ranks: Any, under_ddp: Any, layout: str) -> None:
    world_size, data_ranks, options = LAYOUTS[layout]
    expected, told = under_ddp(data_ranks)
    assert told["trained on"] == [16.0, 16.0, 32.0, 32.0]
    for record, found in ranks(train, world_size, options, data_ranks, 9):
        assert differences(record, expected) == []
        assert found.keys() == told.keys()
        for name, value in told.items():
            assert _near(found[name], value), (name, found[name], value)


def _near(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_near(ours[key], value) for key, value in theirs.items())
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_near, ours, theirs))
    return bool(ours == pytest.approx(theirs, rel=1e-5))
