"""Examples from the documentation of Lightning, torchmetrics and peft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.base import CLASSES, DIM, Classifier, Computes, images, stepped, texts, vectors
from tests.zoo.cells import Row
from tests.zoo.families import build


class Adapted(Computes):
    """A Llama whose weights are frozen beside those that peft adds, of which only the latter are optimized."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def adapted(kind: str, **options: Any) -> Callable[[], Adapted]:
    def network() -> nn.Module:
        import peft

        config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        model: nn.Module = peft.get_peft_model(build("CausalLM", "llama"), config)
        return model

    return lambda: Adapted(network)


lora = partial(adapted, "LoraConfig", r=4, init_lora_weights=False)


class AutoEncoder(pl.LightningModule):
    """The first module of Lightning's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3 * 8 * 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3, eps=1e-4)


class Gan(pl.LightningModule):
    """Two optimizers by hand, as in Lightning's example; the noise is the sample itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(DIM, 32), nn.LeakyReLU(0.2), nn.Linear(32, DIM), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(DIM, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(of_generator)
        fooled = self.discriminator(self.generator(real.flip(1)))
        loss = F.binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled))
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_discriminator)
        seen, made = self.discriminator(real), self.discriminator(self.generator(real.flip(1)).detach())
        loss = F.binary_cross_entropy_with_logits(seen, torch.ones_like(seen))
        loss = (loss + F.binary_cross_entropy_with_logits(made, torch.zeros_like(made))) / 2
        self.manual_backward(loss)
        of_discriminator.step()
        of_discriminator.zero_grad()
        self.untoggle_optimizer(of_discriminator)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.generator, self.discriminator)]


class Measured(Classifier):
    """Metrics of torchmetrics as attributes, updated and logged in the step."""

    def __init__(self) -> None:
        super().__init__()
        import torchmetrics

        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.metrics = torchmetrics.MetricCollection(
            [torchmetrics.ConfusionMatrix(task="multiclass", num_classes=CLASSES), torchmetrics.SumMetric()],
            compute_groups=False,
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.metrics["MulticlassConfusionMatrix"].update(logits, y)
        self.metrics["SumMetric"].update(y.float())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def seen(self) -> Mapping[str, Any]:
        return {name: metric.compute() for name, metric in self.metrics.items()}


def scheduled(module: nn.Module) -> Any:
    """A schedule of the learning rate in steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Transferred(Classifier):
    """Transfer learning: a frozen extractor of features in eval mode, and a classifier that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.ReLU()).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        self.features.eval()
        with torch.no_grad():
            found = self.features(x)
        return self.net(found)


ALL = "zero3, tensor, pipeline"
CLIPPED, ACCUMULATED = partial(dict, gradient_clip_val=0.5), partial(dict, accumulate_grad_batches=2)
ROWS = [
    Row("LoRA", lora(), texts, equal=f"ddp, zero2, {ALL}, tensor x shard"),
    Row("LoRA, all layers", lora(target_modules="all-linear"), texts, equal=ALL),
    Row("LoRA, head saved", lora(modules_to_save=["lm_head"]), texts, equal=ALL),
    Row("DoRA", lora(use_dora=True), texts, equal=ALL),
    Row("IA3", adapted("IA3Config", init_ia3_weights=False), texts, equal="zero3, pipeline", either="tensor"),
    Row("VeRA", adapted("VeraConfig", r=4, init_weights=False), texts, equal=ALL),
    Row("LoHa", adapted("LoHaConfig", r=2, target_modules=["q_proj", "v_proj"], init_weights=False), texts, equal=ALL),
    Row("OFT", adapted("OFTConfig", oft_block_size=4, init_weights=False), texts, equal=ALL),
    Row(
        "prompt tuning",
        adapted("PromptTuningConfig", num_virtual_tokens=4),
        texts,
        equal="zero3",
        either="tensor, pipeline",
    ),
    Row("autoencoder", AutoEncoder, images, equal="ddp, zero1, zero2, zero3, tensor"),
    Row("GAN", Gan, vectors, equal="zero1, zero2, zero3, tensor", either="ddp"),
    Row(
        "torchmetrics",
        Measured,
        vectors,
        equal="ddp, zero3, tensor",
        either="pipeline",
        observe=lambda _, module: module.seen(),
    ),
    Row("schedule and clipping", stepped(scheduled), vectors, equal=f"ddp, zero2, {ALL}", trainer=CLIPPED),
    Row("accumulation", stepped(scheduled), vectors, equal=f"ddp, {ALL}", trainer=ACCUMULATED),
    Row("transfer learning", Transferred, vectors, equal=f"ddp, {ALL}"),
]
