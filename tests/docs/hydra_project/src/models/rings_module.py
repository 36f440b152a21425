from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class RingsLitModule(L.LightningModule):
    """Classify points; losses and accuracies are metrics of torchmetrics."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., Any] | None,
        compile: bool,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        stages = ("train", "val", "test")
        self.losses = nn.ModuleDict({f"{stage}_loss": MeanMetric() for stage in stages})
        self.accuracies = nn.ModuleDict({f"{stage}_acc": MulticlassAccuracy(3, average="micro") for stage in stages})
        self.val_acc_best = MaxMetric()

    def setup(self, stage: str) -> None:
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def on_train_start(self) -> None:
        self.val_acc_best.reset()

    def _step(self, batch: list[Tensor], stage: str) -> Tensor:
        points, labels = batch
        logits = self.net(points)
        loss = self.criterion(logits, labels)
        mean, accuracy = self.losses[f"{stage}_loss"], self.accuracies[f"{stage}_acc"]
        mean(loss.detach())
        accuracy(logits.argmax(1), labels)
        self.log(f"{stage}/loss", mean, on_step=False, on_epoch=True)
        self.log(f"{stage}/acc", accuracy, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._step(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._step(batch, "val")

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.accuracies["val_acc"].compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._step(batch, "test")

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is None:
            return {"optimizer": optimizer}
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}
