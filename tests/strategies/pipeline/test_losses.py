"""Losses, logged values and gradients of several micro-batches are those of one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.harness import make_trainer
from trainwright.strategies.pipeline.tracing.stand_ins import StandIns
from trainwright.strategies.pipeline.tracing.whole_batch import Rehearsal, Replay
from trainwright.strategies.pipeline.training import PipelineStep, Training

Ranks = Callable[..., list[Any]]
WORDS, WIDTH, LENGTH, BATCH, STEPS = 12, 8, 5, 8, 4


class Words(pl.LightningModule):
    """A language model of two blocks in double precision, with one of the losses below."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.losses = form, []  # type: str, list[float]
        self.enter, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH) if form == "batch_norm" else nn.Identity()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("weights", torch.linspace(0.5, 2, WORDS))
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        x = self.enter(ids)
        if self.form == "noise":
            x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype) + float(np.random.rand())
        if self.form == "mixup":
            order = torch.randperm(len(ids))
            x = 0.7 * x + 0.3 * self.enter(ids[order])
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x.flatten(0, 1)).view_as(x) if self.form == "batch_norm" else x
        logits = self.head(x)
        loss = FORMS[self.form](self, logits, labels, x)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", accuracy(logits, labels, "selected" in self.form), batch_size=len(ids))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        engines = getattr(self.trainer.strategy, "_engines", None)
        self.is_joined = engines is not None and engines._pipeline._training.is_whole

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of each position; 0 where it is ignored."""
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def accuracy(logits: Tensor, labels: Tensor, selects: bool) -> Tensor:
    """Share of correct tokens; one that selects them has other shapes in each micro-batch."""
    correct, valid = (logits.argmax(-1) == labels).float(), labels >= 0
    return correct[valid].mean() if selects else (correct * valid).sum() / valid.sum()


def masked_mean(module: Any, logits: Tensor, labels: Tensor, x: Tensor) -> Tensor:
    mask = (labels != -100).double()
    return (entropy(logits, labels) * mask).sum() / mask.sum().clamp(min=1)


def normalized_mask(module: Any, logits: Tensor, labels: Tensor, x: Tensor) -> Tensor:
    mask = (labels != -100).double()
    return (entropy(logits, labels) * (mask / mask.sum())).sum()


def share_of_samples(module: Any, logits: Tensor, labels: Tensor, x: Tensor) -> Tensor:
    """With numbers of Python that differ in a micro-batch, one of them a factor of data."""
    mask = (labels != -100).double() / len(labels)
    return 0.1 * (entropy(logits, labels) * mask).sum() + 0.01 * x.square().sum() / len(labels)


def later_term(module: Any, logits: Tensor, labels: Tensor, x: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + 0.1 * x.square().mean() if module.global_step > 1 else loss


def contrast(module: Any, logits: Tensor, labels: Tensor, x: Tensor) -> Tensor:
    z = F.normalize(x.mean(1), dim=-1)
    return F.cross_entropy(z @ z.T / module.scale, torch.arange(len(z)))


def trimmed(module: Any, logits: Tensor, labels: Tensor, x: Tensor) -> Tensor:
    """To the longest sample: a bound that is a tensor."""
    longest = (labels >= 0).sum(1).max().clamp(min=1)
    return x[:, :longest].square().mean() + F.cross_entropy(logits.transpose(1, 2), labels)


def two_terms(module: Any, logits: Tensor, labels: Tensor, x: Tensor) -> Tensor:
    odd = labels % 2 == 1
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + module.scale * x[odd].square().mean()


def uncertain(module: Any, logits: Tensor, labels: Tensor, x: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return torch.exp(-module.scale) * loss + module.scale + 0.01 * module.scale.square()


FORMS: dict[str, Any] = {
    "ignore_index": lambda m, logits, labels, x: F.cross_entropy(logits.transpose(1, 2), labels),
    "class_weights": lambda m, logits, labels, x: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), m.weights),
    "smoothing": lambda m, logits, labels, x: nn.CrossEntropyLoss(label_smoothing=0.1)(logits.transpose(1, 2), labels),
    "nll": lambda m, logits, labels, x: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten()),
    "masked_mean": masked_mean,
    "normalized_mask": normalized_mask,
    "share_of_samples": share_of_samples,
    "selected": lambda m, logits, labels, x: F.cross_entropy(logits[labels >= 0], labels[labels >= 0]),
    "selected_mean": lambda m, logits, labels, x: entropy(logits, labels)[labels != -100].mean(),
    "per_sample": lambda m, logits, labels, x: (
        entropy(logits, labels).sum(1) / (labels != -100).sum(1).clamp(min=1)
    ).mean(),
    "sum": lambda m, logits, labels, x: 0.01 * entropy(logits, labels).sum(),
    "sum_by_size": lambda m, logits, labels, x: entropy(logits, labels).sum() / (len(labels) * labels.shape[1]),
    "two_terms": two_terms,
    "uncertain": uncertain,
    "later_term": later_term,
    "squares": lambda m, logits, labels, x: F.mse_loss(x, torch.ones_like(x)),
    "noise": lambda m, logits, labels, x: (
        F.cross_entropy(logits.transpose(1, 2), labels) + (x + torch.randn_like(x)).square().mean()
    ),
    "mixup": lambda m, logits, labels, x: F.cross_entropy(logits.transpose(1, 2), labels),
    # Once per batch:
    "trimmed": trimmed,
    "root": lambda m, logits, labels, x: F.mse_loss(x, torch.ones_like(x)).sqrt(),
    "largest": lambda m, logits, labels, x: entropy(logits, labels).max(),
    "contrast": contrast,
    "centered": lambda m, logits, labels, x: (x - x.mean((0, 1))).square().sum(-1).mean(),
    "batch_norm": lambda m, logits, labels, x: F.cross_entropy(logits.transpose(1, 2), labels),
    "quotient": lambda m, logits, labels, x: x.square().mean() / (1 + logits.square().mean()),
    "clamped": lambda m, logits, labels, x: F.cross_entropy(logits.transpose(1, 2), labels).clamp(max=2.4),
}
JOINED = {"trimmed", "root", "largest", "contrast", "centered", "batch_norm", "quotient", "clamped"}


def batches(samples: int = BATCH * STEPS) -> DataLoader[Any]:
    """The first batch is complete; later ones have more and more ignored targets, whole samples among them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (samples, LENGTH), generator=generator)
    labels = ids.roll(-1, 1)
    for sample in range(BATCH, samples):
        labels[sample, int(torch.randint(LENGTH + 1, (), generator=generator)) :] = -100
    labels[BATCH + 1 : BATCH + 3] = -100
    return DataLoader(TensorDataset(ids, labels), batch_size=BATCH)


def trained(form: str, strategy: str, **options: Any) -> Any:
    """Return losses, logged values, parameters and buffers, the next random numbers, and whether batches are joined."""
    module = Words(form)
    options = {"certificate": "refuse", **options} if strategy != "single" else options
    trainer = make_trainer(strategy, options, max_epochs=2)
    pl.seed_everything(3, verbose=False)
    trainer.fit(module, batches(BATCH * STEPS - 1))
    found = {name: value.clone() for name, value in module.state_dict().items()}
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.losses, logged, found, float(torch.rand(())), module.is_joined


def compare(form: str, found: Any, alone: Any) -> None:
    assert found[0] == pytest.approx(alone[0], rel=1e-9, nan_ok=True), form
    assert found[1] == pytest.approx(alone[1], rel=1e-6, nan_ok=True), form
    for name, value in alone[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-8, atol=1e-9, equal_nan=True, msg=f"{form}: {name}")
    assert found[3] == alone[3], f"{form}: other random numbers"


@pytest.mark.sample(8)
@pytest.mark.parametrize("form", FORMS)
def test_losses_of_the_whole_batch(ranks: Ranks, form: str) -> None:
    (alone,) = ranks(trained, 1, form, "single", init_group=False)
    for found in ranks(trained, 2, form, "pipeline", micro_batches=4):
        compare(form, found, alone)
        assert found[4] == (form in JOINED)


def followed(form: str) -> int:
    """Return how many micro-batches were followed call by call on this rank."""
    with mock.patch.object(Replay, "_replayed", autospec=True, side_effect=Replay._replayed) as run:
        trained(form, "pipeline", micro_batches=4, certificate="off")
    return len({id(call.args[0]) for call in run.call_args_list})


@pytest.mark.parametrize(("form", "parts"), [("ignore_index", 1), ("selected", 4)])
def test_micro_batches_of_the_same_shapes_repeat_the_first(ranks: Ranks, form: str, parts: int) -> None:
    """One of each shape in a step (the last has 2, 2, 2 and 1 samples), unless samples are selected."""
    assert max(ranks(followed, 2, form)) == 2 * (parts * STEPS + (parts == 1))


def operators(form: str) -> list[int]:
    """Return how many operators on tensors without values each step runs."""
    counts: list[int] = []

    def rehearse(self: Training, step: PipelineStep) -> Rehearsal:
        with mock.patch.object(FakeTensorMode, "dispatch", autospec=True, side_effect=FakeTensorMode.dispatch) as run:
            rehearsal = real(self, step)
        counts.append(run.call_count)
        return rehearsal

    real = Training._rehearse
    with mock.patch.object(Training, "_rehearse", rehearse):
        trained(form, "pipeline", micro_batches=4, certificate="off")
    return counts


def test_a_rehearsal_repeats_no_operators(ranks: Ranks) -> None:
    """Arguments of known forms have known results: all those of the second epoch."""
    for counts in ranks(operators, 2, "two_terms"):
        assert counts[0] > 0
        assert counts[STEPS:] == [0] * STEPS


def test_shapes_that_depend_on_values_are_not_known() -> None:
    """Bounds and sizes may be tensors, such as the length of the longest sample."""
    stand_ins = StandIns(mock.Mock(parameters=()), None, torch.device("cpu"))
    x = stand_ins.like(torch.zeros(4, 8, 3))
    for length in (5, 7):
        bound = torch.tensor(length)
        for func, args in ((Tensor.__getitem__, (slice(None), slice(None, bound))), (Tensor.narrow, (1, 0, bound))):
            given = (x, args) if func is Tensor.__getitem__ else (x, *args)
            assert stand_ins.call(func, given, {})[0].shape == (4, length, 3)
