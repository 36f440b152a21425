"""``loss_weighting="tokens"``: the gradient of one process that sees the whole global batch, under every strategy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from tests.callbacks.modules import Written
from tests.parity.harness import TOLERANCE, Record, Recorder, differences, make_trainer, whole, world_size
from tests.parity.modules import LENGTH, VOCABULARY, Decoder
from trainwright.callbacks.global_loss import GlobalLoss

GLOBAL_BATCH = 12
STEPS = 5  # the fourth has only 5 samples, so the fifth is of the second epoch
SAMPLES = 41
SEVERAL = ("ddp", "zero1", "zero2", "zero3")


class Labelled(Dataset):
    """Sequences of which most positions have no label (-100); some samples have none at all, so have micro-batches."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
        self.labels = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
        lengths = torch.randint(-3, LENGTH + 1, (samples, 1), generator=generator)
        lengths[::7] = LENGTH
        self.labels[torch.arange(LENGTH) >= lengths] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


class MaskedModel(pl.LightningModule):
    """Mean cross-entropy over the labels that are there."""

    def __init__(self, variant: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.decoder = Decoder()
        self.variant = variant
        weight = torch.linspace(0.5, 2, VOCABULARY) if variant == "weighted" else None
        self.criterion = nn.CrossEntropyLoss(weight, label_smoothing=0.1 if variant == "smooth" else 0.0)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits, labels = self.decoder(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
        if self.variant == "nll":
            return F.nll_loss(logits.log_softmax(-1), labels)
        if self.variant == "spatial":
            logits = logits.view(*batch["labels"].shape, -1).transpose(1, 2)
            return {"loss": F.cross_entropy(logits, batch["labels"]), "extra": 1}
        if self.variant == "linear":
            weight = self.decoder.head.weight * self.decoder.temperature
            return F.linear_cross_entropy(self.decoder.hidden.flatten(0, 1), weight, labels)
        if self.variant == "own":
            losses = F.cross_entropy(logits, labels, reduction="none")
            return losses.sum() / (labels != -100).sum().clamp(min=1)
        if self.variant == "watched":
            with torch.no_grad():
                F.cross_entropy(logits, labels, reduction="sum")
        return self.criterion(logits, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def count_labels(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def one_process(
    variant: str = "plain", clip: float | None = None, samples: int = SAMPLES, steps: int = STEPS
) -> Record:
    """A bare loop that sees each global batch at once."""
    module, data, record = MaskedModel(variant), Labelled(samples), Record()
    optimizer: Any = module.configure_optimizers()
    for step in range(steps):
        first = step % -(-samples // GLOBAL_BATCH) * GLOBAL_BATCH
        optimizer.zero_grad()
        batch = default_collate([data[i] for i in range(first, min(first + GLOBAL_BATCH, samples))])
        output = module.training_step(batch, step)
        loss = output["loss"] if isinstance(output, dict) else output
        loss.backward()
        record.losses.append(loss.item())
        record.gradients = {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    record.parameters = {name: whole(p) for name, p in module.named_parameters()}
    return record


class StepLoss(Recorder):
    """Takes the loss of the step from what is logged."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        pass


def train(
    strategy: str,
    accumulation: int,
    variant: str = "plain",
    options: dict[str, Any] | None = None,
    samples: int = SAMPLES,
    **trainer_options: Any,
) -> Record:
    recorder, written = StepLoss(), Written()
    trainer_options.setdefault("global_batch_size", GLOBAL_BATCH)
    trainer = make_trainer(
        strategy,
        options,
        **{
            "loss_weighting": "tokens",
            "max_steps": STEPS,
            "max_epochs": -1,
            "callbacks": [recorder, GlobalLoss(2)],
            "logger": written,
            **trainer_options,
        },
    )
    loader = DataLoader(Labelled(samples), batch_size=GLOBAL_BATCH // (world_size() * accumulation))
    trainer.fit(MaskedModel(variant), loader)
    recorder.record.losses = list(written.column("loss").values())
    return recorder.record


def check(records: list[Record], reference: Record, tolerance: float = TOLERANCE) -> None:
    assert len(reference.losses) > 1
    for record in records:
        assert differences(record, reference, tolerance) == []


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", SEVERAL)
def test_the_gradient_of_one_process(ranks, strategy, world, clip):
    reference = one_process(clip=clip)
    for accumulation in (1, 3):
        check(ranks(train, world, strategy, accumulation, gradient_clip_val=clip), reference)
