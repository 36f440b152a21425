"""Batches along a run are compared with the module as written: which, and without a trace."""

import json
import random
from contextlib import nullcontext
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from tests.parity.harness import make_trainer
from trainwright.callbacks.certificate import CertificateRecord
from trainwright.strategies.base.certificate.spots import SpotChecks, drawn_after
from trainwright.strategies.contract.batch_digest import structure_of
from trainwright.strategies.contract.collectives import differentiable
from trainwright.strategies.data.sharding import reducer

SAMPLES = 4  # of a step


class Padded(Dataset):
    """Sequences for ``steps`` steps, with ignored targets in the last sample of each from step ``begins``."""

    def __init__(self, steps: int, begins: int) -> None:
        self.begins = begins
        self.tokens = torch.randint(32, (steps * SAMPLES, 9), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index, 1:].clone()
        if index >= self.begins * SAMPLES and index % SAMPLES == 3:
            labels[-3:] = -100
        return {"tokens": self.tokens[index, :-1], "labels": labels}


class Block(nn.Module):
    """Causal attention and a perceptron with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.packed, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.packed(self.norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Layers(pl.LightningModule):
    """Reads gradients of the step before, and changes a buffer, an attribute, a list and a metric in its step."""

    has_ignored = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 32)
        self.mean = MeanMetric()
        self.register_buffer("seen", torch.zeros(()))
        self.steps, self.drawn, self.gradients = 0, [], []  # type: ignore[var-annotated]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Layers.has_ignored = bool((batch["labels"] < 0).any())
        self.steps = batch_idx + 1
        self.seen.fill_(batch_idx + 1)
        self.drawn.append((random.random(), np.random.rand()))
        x = self.embedding(batch["tokens"])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())
        if not loss.isnan():
            self.mean.update(loss.detach())
        self.log("train", loss)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.trainer.accumulate_grad_batches == 1:
            gradient = self.embedding.weight.grad
            self.gradients.append(None if gradient is None else float(gradient.abs().sum()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Weights(pl.Callback):
    """Keeps the weights of this rank, after each step and when the run fails."""

    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []
        self.at_end: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.after.append(_own(pl_module))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.at_end = _own(pl_module)


def _own(module: Any) -> dict[str, Tensor]:
    return {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in module.named_parameters()}


def train(options: dict[str, Any], accumulation: int) -> tuple[Any, ...]:
    """Train, with a check before each step."""
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # type: ignore[func-returns-value]
    module, weights = Layers(), Weights()
    trainer = make_trainer("hybrid", options, max_steps=3, global_batch_size=SAMPLES, callbacks=[weights])
    size = SAMPLES // (trainer.strategy.ranks.num_data_ranks * accumulation)
    with mock.patch.object(SpotChecks, "is_drawn", return_value=True):
        trainer.fit(module, DataLoader(Padded(4, 4), batch_size=size))
    state = module.steps, module.drawn, module.gradients, float(module.mean.compute())
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    made = [(check.step, check.reason) for check in trainer.strategy.certificate.checks]
    return weights.after, module.seen.clone(), state, logged, torch.get_rng_state(), made


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("options", "accumulation"),
    [
        ({"stage": 3}, 2),
        ({"stage": 2}, 1),
        ({"tensor": 2, "shard": 1}, 1),
        ({"pipeline": 2, "shard": 1}, 2),
        ({"context": 2, "shard": 1}, 2),
    ],
    ids=str,
)
def test_a_check_leaves_no_trace(ranks: Any, options: dict[str, Any], accumulation: int) -> None:
    """With dropout and accumulation, all state has the same bits as without checks; they precede optimizer steps."""
    checked = ranks(train, 2, {**options, "certificate": "refuse"}, accumulation)
    without = ranks(train, 2, {**options, "certificate": "off"}, accumulation)
    for one, other in zip(checked, without, strict=True):
        for here, there in zip(one[0], other[0], strict=True):
            assert all(torch.equal(value, there[name]) for name, value in here.items())
        assert torch.equal(one[1], other[1])
        assert one[2:4] == other[2:4]
        assert torch.equal(one[4], other[4])
        assert one[5] == [(0, "first batch"), (1, "drawn"), (2, "drawn")]


def _wrong_sum(x: Tensor, group: Any, _sum: Any = differentiable.reduce_from) -> Tensor:
    return _sum(x, group) * (1.01 if Layers.has_ignored else 1)


def _wrong_scatter(
    out: Tensor, given: Tensor, *args: Any, _scatter: Any = reducer.reduce_scatter, **kwargs: Any
) -> Any:
    return _scatter(out, given * (1.01 if Layers.has_ignored else 1), **kwargs)


FAULTS = {"tensor": (differentiable, "reduce_from", _wrong_sum), "stage": (reducer, "reduce_scatter", _wrong_scatter)}


def train_padded(
    options: dict[str, Any], folder: str, begins: int, steps: int, fault: str = "", resumes: bool = False
) -> tuple[Any, ...]:
    """Train on a fault of the layout in batches with ignored targets; keep a checkpoint per step.

    Without drawn checks, which depend on the time of steps.
    """
    Layers.has_ignored = False
    weights, record = Weights(), CertificateRecord(Console(quiet=True))
    saving = ModelCheckpoint(folder, "last", save_top_k=-1, every_n_train_steps=1, enable_version_counter=False)
    trainer = make_trainer(
        "hybrid",
        {"certificate": "refuse", **options},
        max_steps=steps,
        global_batch_size=SAMPLES,
        callbacks=[weights, record, saving],
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    error = ""
    loader = DataLoader(Padded(steps, begins), batch_size=SAMPLES // trainer.strategy.ranks.num_data_ranks)
    faulty = mock.patch.object(*FAULTS[fault]) if fault else nullcontext()
    with faulty, mock.patch.object(SpotChecks, "is_drawn", return_value=False):
        try:
            trainer.fit(Layers(), loader, ckpt_path=f"{folder}/last.ckpt" if resumes else None)
        except RuntimeError as raised:
            error = str(raised)
    made = [(check.step, check.reason, check.outcome.holds) for check in trainer.strategy.certificate.checks]
    return error, weights.after, weights.at_end, made


PADDING = "new structure: some values of batch['labels'] are negative"


@pytest.mark.parametrize("options", [{"tensor": 2, "shard": 1}, {"stage": 2}], ids=str)
def test_refuses_a_batch_of_a_new_structure(ranks: Any, options: dict[str, Any], tmp_path: Any) -> None:
    """Before its step changes a weight; the last checkpoint resumes to the numbers of an uninterrupted run."""
    fault = "tensor" if "tensor" in options else "stage"
    for error, after, at_end, made in ranks(train_padded, 2, options, str(tmp_path), 3, 6, fault):
        assert "on the batch after step 3 (" + PADDING in error
        assert "has not changed a weight" in error
        assert "ckpt_path=last" in error
        assert made == [(0, "first batch", True), (3, PADDING, False)]
        assert len(after) == 3
        assert all(torch.equal(value, at_end[name]) for name, value in after[-1].items())
    resumed = ranks(train_padded, 2, options, str(tmp_path), 3, 6, "", True)
    without = ranks(train_padded, 2, {**options, "certificate": "off"}, str(tmp_path / "off"), 3, 6)
    for one, other in zip(resumed, without, strict=True):
        assert one[3] == [(3, PADDING, True)]
        assert all(torch.equal(value, other[1][-1][name]) for name, value in one[1][-1].items())
    record = json.loads((tmp_path / "certificate.json").read_text())
    assert [(check["step"], check["holds"]) for check in record["checks"]] == [(0, True), (3, False), (3, True)]
    assert record["checks"][2]["reason"] == PADDING
    assert record["checks"][2]["seconds"] > 0


def test_several_data_ranks_compare_a_kept_batch(ranks: Any, tmp_path: Any) -> None:
    """Behind the first 16 steps, at the next agreement, with the step from which weights may be wrong."""
    for error, after, _, made in ranks(train_padded, 2, {"stage": 2}, str(tmp_path), 20, 40, "stage"):
        assert "on the batch after step 20" in error
        assert "Weights are right up to step 0" in error
        assert (len(after), made[-1][0]) == (33, 33)


def test_budget() -> None:
    """Drawn checks are denser at the start, and take 0.5 % of 1,000 steps, or of a longer run; the seed decides."""
    drawn = [drawn_after(7, 0)]
    while drawn[-1] < 1000:
        drawn.append(drawn_after(7, drawn[-1]))
    assert [step.bit_length() for step in drawn] == [*range(2, len(drawn) + 2)]
    assert drawn_after(7, drawn[3] - 1) == drawn[3] == drawn_after(7, drawn[2])
    assert drawn != [drawn_after(8, step - 1) for step in drawn]
    spots, taken, cost = SpotChecks(7, 0, (), 0.0133), [], mock.Mock(seconds=0.0233, written_seconds=0.0133)
    spots._pace = 0.01
    for step in range(1, 30_000):
        if spots.is_drawn(step):
            taken.append(step)
            spots.spend(cost, is_new=False)
    assert 1 <= len([step for step in taken if step < 1000]) <= 2
    assert len(taken) * 0.0233 <= 0.005 * 0.01 * 30_000
    assert len(taken) > 4
    slow = SpotChecks(7, 0, (), 0.05)
    slow._pace = 0.01
    assert not any(map(slow.is_drawn, range(1, 1000)))


def test_structure_of_a_batch() -> None:
    """Sizes and shares are rounded, so that ragged batches have few structures, and padding that begins is one."""
    labels = torch.arange(24).view(4, 6)
    padded = labels.clone()
    padded[0, 3:] = -100
    mask = torch.ones(4, 6)

    def facts(batch: Any) -> set[str]:
        return set(structure_of(batch, lambda _: True))

    assert facts({"labels": labels}) == facts({"labels": labels[:, :5]})
    assert facts({"labels": labels}) != facts({"labels": labels[:, :3]})
    assert facts({"labels": padded}) - facts({"labels": labels}) == {"some values of batch['labels'] are negative"}
    assert facts([labels, mask]) - facts([labels, mask.bool()]) == {"batch[] is torch.float32 of shape (4-7, 4-7)"}
    assert facts({"mask": mask.tril()}) - facts({"mask": mask}) == {"most values of batch['mask'] are 0"}
    assert facts({"a": 1}) - facts({}) == {"batch['a'] is int"}
