"""``loss_weighting="tokens"``: the gradient of one process that sees the whole global batch, under every strategy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy as LightningStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, default_collate

from tests.callbacks.modules import Written
from tests.parity.harness import (
    QUIET,
    TOLERANCE,
    Record,
    Recorder,
    differences,
    make_trainer,
    train_bare,
    whole,
    world_size,
)
from tests.parity.modules import LENGTH, VOCABULARY, Decoder
from trainwright import Trainer
from trainwright.callbacks.progress.global_loss import GlobalLoss
from trainwright.core.run.traits import Traits
from trainwright.strategies.data.single import SingleDeviceStrategy

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
            hidden = self.decoder.embedding(batch["tokens"]).flatten(0, 1)
            return F.linear_cross_entropy(hidden, self.decoder.head.weight, labels)
        if self.variant == "imported":
            return cross_entropy(logits, labels)
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


def one_process(variant: str = "plain", clip: float | None = None) -> Record:
    """A bare loop that sees each global batch at once."""
    return train_bare(MaskedModel(variant), Labelled(), GLOBAL_BATCH, STEPS, clip)


class Gradients(Recorder):
    """Gradients and parameters; the loss of a step is taken from what is logged."""

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def train(
    strategy: str,
    accumulation: int,
    variant: str = "plain",
    options: dict[str, Any] | None = None,
    data: Dataset | None = None,
    **trainer_options: Any,
) -> Record:
    recorder, written = Gradients(), Written()
    given = {"global_batch_size": GLOBAL_BATCH, "loss_weighting": "tokens", "max_steps": STEPS, **trainer_options}
    trainer = make_trainer(strategy, options, callbacks=[recorder, GlobalLoss(2)], logger=written, **given)
    loader = DataLoader(data or Labelled(), batch_size=GLOBAL_BATCH // (world_size() * accumulation))
    trainer.fit(MaskedModel(variant), loader)
    recorder.record.losses = list(written.column("loss").values())
    return recorder.record


def check(records: list[Record], reference: Record, tolerance: float = TOLERANCE) -> None:
    assert len(reference.losses) > 1
    for record in records:
        assert differences(record, reference, tolerance) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(("world", "clip", "accumulation"), [(2, 0.05, 1), (2, 0.05, 3), (4, None, 3)])
@pytest.mark.parametrize("strategy", SEVERAL)
def test_the_gradient_of_one_process(ranks, strategy, world, clip, accumulation):
    check(ranks(train, world, strategy, accumulation, gradient_clip_val=clip), one_process(clip=clip))


@pytest.mark.sample(7)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("variant", ["nll", "spatial", "linear", "weighted", "smooth", "watched", "imported"])
def test_tokens_are_counted(variant, accumulation):
    check([train("single", accumulation, variant)], one_process(variant))


@pytest.mark.parametrize("path", [count_labels, f"{__name__}:count_labels", lambda batch: int(count_labels(batch))])
def test_a_count_of_ones_own(path):
    check([train("single", 3, "own", token_count=path)], one_process("own"))


def test_the_loss_of_one_process():
    losses, expected = train("single", 1).losses, one_process().losses
    assert losses[0] == expected[0], "before the first step there is nothing to differ by"
    # Its gradient is that of a sum, divided once: rounded elsewhere than that of a mean, as processors go.
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", SEVERAL)
def test_scaled_gradients_of_fp16(ranks, strategy):
    records = ranks(train, 2, strategy, 3, precision="16-mixed", gradient_clip_val=0.05)
    # fp16 has 11 bits of mantissa; the first momentum of SGD keeps what rounding did to early steps.
    check(records, one_process(clip=0.05), 0.02)


@pytest.mark.thorough
def test_offloaded_state(ranks):
    for stage, offload in (("zero1", "optimizer"), ("zero3", "optimizer"), ("zero3", "parameters")):
        check(ranks(train, 2, stage, 3, options={"offload": offload}), one_process())


def test_lightnings_own_path_with_a_profiler(ranks):
    check(ranks(train, 2, "zero2", 3, profiler="simple"), one_process())


def test_replicas_of_shards(ranks):
    check(ranks(train, 4, "zero2", 3, options={"replicate": 2}), one_process())


class Unlabelled(Labelled):
    def __init__(self) -> None:
        super().__init__()
        self.labels.fill_(-100)


def test_a_step_without_any_token_changes_nothing(ranks):
    for record in ranks(train, 2, "ddp", 1, data=Unlabelled(), max_steps=2):
        assert record.losses == [0.0, 0.0]
        assert all(not gradient.any() for gradient in record.gradients.values())
        assert all(value.isfinite().all() for value in record.parameters.values())


# ---- Off ------------------------------------------------------------------------------------------------------------


def mean_of_means(accumulation: int) -> dict[str, Tensor]:
    """Parameters after a bare loop that weighs micro-batches alike; all of them are full and have a label."""
    module, data = MaskedModel(), Labelled(36)
    optimizer: Any = module.configure_optimizers()
    size = GLOBAL_BATCH // accumulation
    for first in range(0, 36, GLOBAL_BATCH):
        optimizer.zero_grad()
        for start in range(first, first + GLOBAL_BATCH, size):
            loss = module.training_step(default_collate([data[i] for i in range(start, start + size)]), 0)
            (loss / accumulation).backward()
        optimizer.step()
    return {name: whole(p) for name, p in module.named_parameters()}


def test_the_default_is_the_mean_of_means_bit_for_bit():
    expected = mean_of_means(3)
    found = train("single", 3, data=Labelled(36), loss_weighting="micro_batch", max_steps=3).parameters
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    weighed = train("single", 3, data=Labelled(36), max_steps=3).parameters
    assert not any(torch.allclose(weighed[name], value, rtol=1e-4) for name, value in expected.items())


# ---- Refused --------------------------------------------------------------------------------------------------------


class Odd(MaskedModel):
    """Computes its loss in a way from which the number of tokens cannot be determined."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.automatic_optimization = how != "manual"

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, labels = self.decoder(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
        if self.how == "twice":
            return F.cross_entropy(logits, labels) + F.nll_loss(logits, labels)
        if self.how == "sum":
            return F.cross_entropy(logits, labels, reduction="sum")
        if self.how == "legacy":
            return F.cross_entropy(logits, labels, size_average=False)
        if self.how == "probabilities":
            return F.cross_entropy(logits, torch.rand_like(logits))
        return logits.square().mean()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("none", "found no call of cross_entropy"),
        ("twice", "a second loss .*nll_loss"),
        ("sum", "reduction='sum'"),
        ("legacy", "reduction='sum'"),
        ("probabilities", "probabilities as targets"),
    ],
)
def test_losses_that_cannot_be_counted_are_refused(how, said):
    trainer = make_trainer("single", loss_weighting="tokens", max_steps=1)
    before = F.cross_entropy, F.nll_loss, cross_entropy
    with pytest.raises(RuntimeError, match=f"{said}.*token_count='package.module:function'.*'micro_batch'"):
        trainer.fit(Odd(how), DataLoader(Labelled(), batch_size=4))
    assert (F.cross_entropy, F.nll_loss, cross_entropy) == before, "put back"


def test_manual_optimization_is_refused():
    trainer = make_trainer("single", loss_weighting="tokens", max_steps=1)
    with pytest.raises(ValueError, match="Odd sets automatic_optimization=False.*loss_weighting='micro_batch'"):
        trainer.fit(Odd("manual"), DataLoader(Labelled(), batch_size=4))


class RunsBackward(SingleDeviceStrategy):
    """A strategy with a pipeline that does not weigh its micro-batches."""

    traits = Traits(backward_in_step=True)


def test_a_strategy_that_would_not_weigh_is_refused():
    trainer = Trainer(strategy=RunsBackward(), devices=1, loss_weighting="tokens", max_steps=1, **QUIET)
    with pytest.raises(ValueError, match="not supported by RunsBackward .*pipeline=1"):
        trainer.fit(MaskedModel(), DataLoader(Labelled(), batch_size=4))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_weighting": "token"}, "loss_weighting='token' .allowed: 'micro_batch', 'tokens'"),
        ({"token_count": "a.b:c"}, "token_count='a.b:c' is used only with loss_weighting='tokens'"),
        ({"loss_weighting": "tokens", "token_count": "math:none"}, "cannot be found .*package.module:function"),
        ({"loss_weighting": "tokens", "token_count": "no_colon"}, "cannot be found"),
        ({"loss_weighting": "tokens", "token_count": "math:pi"}, "must be a function of the batch"),
        ({"loss_weighting": "tokens", "strategy": LightningStrategy("cpu")}, "not supported with SingleDeviceStrategy"),
    ],
)
def test_impossible_arguments_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Trainer(**{"strategy": "single", "devices": 1, **QUIET, **options})


def test_a_count_that_is_no_number_is_refused():
    trainer = make_trainer("single", loss_weighting="tokens", token_count=lambda batch: batch["labels"], max_steps=1)
    with pytest.raises(ValueError, match="token_count returned a tensor of shape .4, 6.; it must return one number"):
        trainer.fit(MaskedModel("own"), DataLoader(Labelled(), batch_size=4))
