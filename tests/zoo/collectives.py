"""Collectives in users' code: ``all_gather``, torchmetrics, ``sync_dist``, barriers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from tests.zoo.base import CLASSES, Classifier, validated, vectors
from tests.zoo.cells import Row


class Gathers(Classifier):
    """Each sample against all samples of the global batch (SimCLR on several ranks)."""

    def loss(self, batch: Any) -> Tensor:
        z = F.normalize(self(batch[0]), dim=-1)
        others = self.all_gather(z, sync_grads=True)
        labels = self.all_gather(batch[1])
        others, labels = others.flatten(0, -2), labels.flatten()
        return F.mse_loss(z @ others.mT, (batch[1][:, None] == labels).float())


class GathersDetached(Classifier):
    """A negative from everywhere, without gradients."""

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        center = self.all_gather(out.detach()).flatten(0, -2).mean(0)
        return F.cross_entropy(out, batch[1]) + 0.1 * (out - center).square().mean()


class LogsGathered(Classifier):
    """Logs the number of distinct samples that all ranks saw."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        seen = self.all_gather(batch[0]).flatten(0, -2)
        self.log("count", float(len(seen)))
        self.log("sum", seen.sum())
        return loss


class GathersDictionary(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        found = self.all_gather({"x": batch[0], "y": [batch[1]]})
        self.log("x", found["x"].flatten(0, -2).sum())
        self.log("y", float(found["y"][0].sum()))
        return loss


class GathersAfterEpoch(Classifier):
    """Gathers predictions of a validation with an uneven last batch."""

    def on_validation_epoch_start(self) -> None:
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self(batch[0]))

    def on_validation_epoch_end(self) -> None:
        gathered = self.all_gather(torch.cat(self.outputs))
        self.log("spread", gathered.flatten(0, -2).mean(), sync_dist=True)


class LogsSynced(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss_synced", loss, sync_dist=True)
        self.log("loss_epoch", loss, sync_dist=True, on_step=False, on_epoch=True)
        self.log("sum_synced", batch[0].sum(), sync_dist=True, reduce_fx="sum")
        self.log("max_synced", batch[0].max(), sync_dist=True, reduce_fx="max")
        return loss


class Barrier(Classifier):
    """Waits for the other ranks, before and after the blocks ran."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.strategy.barrier("before")
        loss = super().training_step(batch, batch_idx)
        self.trainer.strategy.barrier("after")
        return loss


class ReducesByHand(Classifier):
    """Logs the mean over ranks by ``strategy.reduce``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("mean", self.trainer.strategy.reduce(loss.detach(), reduce_op="mean"))
        return loss


class TorchCollective(Classifier):
    """``torch.distributed`` itself, if there is a group."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        mean = loss.detach().clone()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
            mean /= torch.distributed.get_world_size()
        self.log("mean", mean)
        return loss


class Metrics(Classifier):
    """torchmetrics objects, logged as objects."""

    def __init__(self, make: Callable[[], dict[str, torchmetrics.Metric]] | None = None) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict((make or self.make)())

    def make(self) -> dict[str, torchmetrics.Metric]:
        return {"accuracy": MulticlassAccuracy(CLASSES)}

    def update(self, metric: Any, out: Tensor, y: Tensor) -> None:
        metric(out, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        loss = F.cross_entropy(out, batch[1])
        for name, metric in self.metrics.items():
            self.update(metric, out.detach(), batch[1])
            self.log(name, metric, on_step=False, on_epoch=True)
        return loss


class Several(Metrics):
    def make(self) -> dict[str, torchmetrics.Metric]:
        return {
            "f1": MulticlassF1Score(CLASSES, average="macro"),
            "auroc": MulticlassAUROC(CLASSES),
            "calibration": MulticlassCalibrationError(CLASSES, n_bins=5),
        }


class Means(Metrics):
    def make(self) -> dict[str, torchmetrics.Metric]:
        return {"mean": torchmetrics.MeanMetric(), "largest": torchmetrics.MaxMetric()}

    def update(self, metric: Any, out: Tensor, y: Tensor) -> None:
        metric.update(out.square().mean(-1))


class Sums(Means):
    """Counts each sample once."""

    def make(self) -> dict[str, torchmetrics.Metric]:
        return {"sum": torchmetrics.SumMetric()}

    def update(self, metric: Any, out: Tensor, y: Tensor) -> None:
        metric.update(y.float())


class Confusion(Metrics):
    """A matrix of counts, computed after training."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict()
        self.confusion = MulticlassConfusionMatrix(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.confusion.update(out.detach(), batch[1])
        return F.cross_entropy(out, batch[1])

    def on_train_epoch_end(self) -> None:
        matrix = self.confusion.compute()
        self.log("total", matrix.sum().float())
        self.log("diagonal", matrix.diagonal().sum().float())
        self.confusion.reset()


class Concatenated(Confusion):
    """A metric that keeps all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.confusion = torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.confusion.update(batch[0].sum(-1))
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        values = self.confusion.compute()
        self.log("total", float(values.numel()))
        self.log("sum", values.sum())


class Collected(Metrics):
    """A collection, logged as a dictionary by step and epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict()
        metrics = {"a": MulticlassAccuracy(CLASSES), "b": MulticlassAccuracy(CLASSES, top_k=2)}
        self.collection = MetricCollection(metrics, prefix="train_")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.collection.update(out.detach(), batch[1])
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        return F.cross_entropy(out, batch[1])


class Own(torchmetrics.Metric):
    """As in torchmetrics' documentation: states that are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("correct", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.correct += (preds.argmax(-1) == target).sum()
        self.total += target.numel()

    def compute(self) -> Tensor:
        return self.correct + 0.01 * self.total


class Validates(Metrics):
    """Metrics of a validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def make(self) -> dict[str, torchmetrics.Metric]:
        return {"accuracy": MulticlassAccuracy(CLASSES), "own": Own()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        for name, metric in self.metrics.items():
            metric(out, batch[1])
            self.log(name, metric)
        self.log("val_loss", F.cross_entropy(out, batch[1]), sync_dist=True)


class AccuracyByHand(Classifier):
    """As in Lightning's documentation: a mean of a batch's accuracy."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.log("val_acc", (out.argmax(-1) == batch[1]).float().mean(), sync_dist=True)


class CenteredByAll(Classifier):
    """DINO's center: a mean over all ranks' outputs, kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        loss = F.cross_entropy(out - self.center, batch[1])
        mean = self.all_gather(out.detach().mean(0)).view(-1, CLASSES).mean(0)
        self.center = 0.5 * self.center + 0.5 * mean
        return loss


def uneven(batch: int) -> tuple[Any, Any]:
    """Validation data of 21 samples."""
    loader: Any = vectors(batch)
    data = torch.utils.data.Subset(loader.dataset, range(21))
    return loader, torch.utils.data.DataLoader(data, batch_size=batch)


# Validates after the last step.
AFTER_STEPS = partial(dict, val_check_interval=3, check_val_every_n_epoch=None)
# One epoch, to its end.
EPOCH = partial(dict, max_epochs=1, max_steps=-1)
SYNCED = ("loss_synced", "loss_epoch", "sum_synced", "max_synced")


def _metric(name: str, make: Callable[[], Classifier], *synced: str, **options: Any) -> Row:
    """A row of metrics that are logged at the end of the epoch."""
    return Row(name, make, vectors, trainer=EPOCH, synced=synced, **{"either": "tensor, pipeline", **options})


def _validated(name: str, make: Callable[[], Classifier], *synced: str, equal: str) -> Row:
    """A row of values that are logged in a validation."""
    return Row(name, make, validated, trainer=AFTER_STEPS, synced=synced, equal=equal)


ROWS = [
    Row("all_gather with gradients", Gathers, vectors, equal="tensor", either="ddp, zero2, zero3, pipeline"),
    Row("all_gather without", GathersDetached, vectors, either="tensor, pipeline"),
    Row("samples of all ranks", LogsGathered, vectors, either="ddp, tensor, pipeline", synced=("count", "sum")),
    Row("all_gather of a dictionary", GathersDictionary, vectors, either="tensor, pipeline", synced=("x", "y")),
    Row(
        "all_gather of uneven data",
        GathersAfterEpoch,
        uneven,
        trainer=AFTER_STEPS,
        either="tensor, pipeline, ddp",
        late=True,
    ),
    _metric("sync_dist", LogsSynced, *SYNCED, equal="tensor", either="pipeline"),
    Row("barriers", Barrier, vectors, equal="ddp, tensor", either="pipeline"),
    Row("strategy.reduce", ReducesByHand, vectors, equal="tensor", either="pipeline", synced=("mean",)),
    Row("torch.distributed", TorchCollective, vectors, equal="ddp", either="tensor, pipeline", synced=("mean",)),
    _metric("accuracy", Metrics, "accuracy"),
    _metric("F1, AUROC, calibration", Several, "f1", "auroc", either="ddp, tensor, pipeline"),
    _metric("mean and maximum", Means, "mean", "largest"),
    _metric("sum", Sums, "sum", equal="ddp"),
    _metric("confusion matrix", Confusion, "total", "diagonal"),
    _metric("all values", Concatenated, "total", "sum", equal="ddp"),
    _metric("a collection", Collected, "train_a", "train_b"),
    _metric("a metric of one's own", partial(Metrics, lambda: {"own": Own()}), "own", equal="ddp"),
    _validated("metrics of a validation", Validates, "accuracy", "own", "val_loss", equal="tensor, pipeline"),
    _validated("accuracy by hand", AccuracyByHand, "val_acc", equal="ddp, tensor, pipeline"),
    Row("a center of all outputs", CenteredByAll, vectors, equal="tensor", either="pipeline"),
]
