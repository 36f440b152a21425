"""The certificate finds what is done wrongly to a module, and leaves no trace where nothing is."""

import json
import random
import warnings
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.parity.harness import make_trainer
from tests.parity.layouts import LayoutCase, Texts, run
from tests.pool import RankError
from trainwright.callbacks.certificate import CertificateRecord
from trainwright.strategies.base.certificate.certificate import Certificate
from trainwright.strategies.base.certificate.spots import Check, SpotChecks, pattern_of
from trainwright.strategies.base.certificate.written import AsWritten
from trainwright.strategies.context import attention as context_attention
from trainwright.strategies.contract import cuts
from trainwright.strategies.contract.collectives import differentiable
from trainwright.strategies.data.sharding import reducer
from trainwright.strategies.data.zero import ZeroStrategy
from trainwright.strategies.expert import engine as expert_engine
from trainwright.strategies.pipeline import stage
from trainwright.strategies.pipeline.training import Training
from trainwright.strategies.plan.proof.proof import Proof, ProofVerdict

ON = {"certificate": "refuse"}


def _other_part(self: cuts.Cut, whole: Tensor) -> Tensor:
    """The part of the next rank, of what is split by rows."""
    index = (torch.distributed.get_rank(self.group) + (self.dim == 0)) % self.size
    return torch.cat([piece.chunk(self.size, self.dim)[index] for piece in self._sections(whole)], self.dim).clone()


def _lost_hook(self: Any, *args: Any, _made: Any = reducer.GradientReducer.__init__, **kwargs: Any) -> None:
    """One parameter's gradient is never packed, as if its hooks had been lost."""
    _made(self, *args, **kwargs)
    first, pack = self._buckets[0], self._buckets[0].pack_whole
    first.pack_whole = lambda tensors: pack([None, *list(tensors)[1:]])  # type: ignore[method-assign]


def _own_part_alone(out: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A reduction over a group of this rank alone."""
    out.copy_(given.view(2, -1)[torch.distributed.get_rank()].view_as(out))
    done = torch.futures.Future()  # type: ignore[var-annotated]
    done.set_result(None)
    return done


def _half(form: Any, tensors: Any, with_gradients: bool = True, _leaves: Any = stage.leaves_of) -> Any:
    return _leaves(form, tuple(t * 0.5 for t in tensors), with_gradients)


def _without_factor(x: Tensor, factor: float) -> Tensor:
    return x


def _shifted(packed: Tensor, key: Tensor, value: Tensor, _unpack: Any = context_attention._unpack) -> Any:
    keys, values = _unpack(packed, key, value)
    return keys.roll(1, -2), values


def _stray_write(self: Any, count: int, _run: Any = Training._run_schedule) -> None:
    """A parameter is written to beside the optimizer, after the last gradient."""
    _run(self, count)
    with torch.no_grad():
        next(p for p in self.cut.module.parameters() if not p.is_meta and p.numel() > 1).mul_(0.5)


Fault = tuple[str, dict[str, Any], Any, str, Any]
FAULTS: dict[str, Fault] = {
    "a wrong split": ("gpt", {"tensor": 2, "shard": 1}, cuts.Cut, "part", _other_part),
    "a sum left out": ("gpt", {"tensor": 2, "shard": 1}, differentiable, "reduce_from", lambda x, group: x),
    "a gradient's sum left out": ("gpt", {"tensor": 2, "shard": 1}, differentiable, "copy_to", lambda x, group: x),
    "a lost hook": ("gpt", {"stage": 2}, reducer.GradientReducer, "__init__", _lost_hook),
    "a wrong group": ("gpt", {"stage": 1}, reducer, "reduce_scatter", _own_part_alone),
    "a wrong activation": ("gpt", {"pipeline": 2, "shard": 1}, stage, "leaves_of", _half),
    "a lost gradient": ("gpt", {"pipeline": 2, "shard": 1}, stage, "_pop_gradient", torch.zeros_like),
    "a stray write": ("gpt", {"pipeline": 2, "shard": 1}, Training, "_run_schedule", _stray_write),
    "wrong positions": ("gpt", {"context": 2, "shard": 1}, context_attention, "_unpack", _shifted),
    "a wrong scale": ("mixtral", {"expert": 2, "shard": 2}, expert_engine, "_scale_gradient", _without_factor),
}


def run_with(fault: str, certificate: str) -> list[float]:
    network, options, target, name, wrong = FAULTS[fault]
    # Plans are proven by the same code, which would find some of these sooner.
    blind = mock.patch.object(Proof, "of", return_value=ProofVerdict())
    with blind, mock.patch.object(target, name, wrong):
        return run(LayoutCase(network, {**options, "certificate": certificate}, steps=1)).losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", list(FAULTS))
def test_refuses_wrong_layouts(ranks: Any, fault: str) -> None:
    """On every rank, with what differs and what to type, before a weight changes."""
    with pytest.raises(RankError) as error:
        ranks(run_with, 2, fault, "refuse")
    for text in error.value.tracebacks.values():
        last = text.strip().splitlines()[-1]
        assert "does not compute what" in last or "holds different values of" in last, text
        assert "No weight has changed." in last
        assert "the first to differ is net." in last or "holds other" in last
        assert "strategy.certificate=warn" in last


def losses_with(options: dict[str, Any]) -> list[float]:
    return run(LayoutCase("gpt", {**options, **ON}, steps=1)).losses


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options", [{"stage": 3, "reduce_dtype": "bf16"}, {"pipeline": 2, "shard": 1, "stage_dtype": "bf16"}], ids=str
)
def test_accepts_what_options_round(ranks: Any, options: dict[str, Any]) -> None:
    assert len(ranks(losses_with, 2, options)[0]) == 1


def test_warn_continues_training(ranks: Any) -> None:
    """And the fault is no fault of the test: the run itself goes through."""
    assert len(ranks(run_with, 2, "a lost hook", "warn")[0]) == 1
    with pytest.raises(ValueError, match="certificate=of: unknown; did you mean off. allowed: refuse, warn, off"):
        ZeroStrategy(3, certificate="of")


class Traced(pl.LightningModule):
    """A module full of state: buffers, counters, lists, drawn numbers, a moving average that its step writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 64)
        self.gain = nn.Linear(16, 16)
        self.average = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.steps, self.losses, self.drawn = 0, [], {"numbers": []}  # type: ignore[var-annotated]
        self.blocks[0].register_forward_hook(lambda _, __, output: self.losses.append(output.detach().mean().item()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.seen += len(batch["tokens"])
        x = self.embedding(batch["tokens"])
        batch["tokens"] = batch["tokens"] * 1
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        with torch.no_grad():
            for mean, trained in zip(self.average.parameters(), self.gain.parameters(), strict=True):
                mean.lerp_(trained.detach(), 0.1)
        self.drawn["numbers"].append((random.random(), np.random.rand(), torch.rand(()).item()))
        logits = self.head(self.gain(x[:, :-1]) + self.average(x[:, :-1]).detach())
        loss = F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def train_traced(options: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # type: ignore[func-returns-value]
    module = Traced()
    trainer = make_trainer("hybrid", {**ON, **options}, max_steps=2, global_batch_size=8)
    trainer.fit(module, DataLoader(Texts(16), batch_size=8 // trainer.strategy.ranks.num_data_ranks))
    parameters = dict(trainer.strategy.whole_parameters())
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    made = trainer.strategy.certificate.outcome
    state = module.steps, module.losses, module.drawn, trainer.callback_metrics["loss"].item()
    return parameters, buffers, state, torch.get_rng_state(), made is not None and made.holds


@pytest.mark.parametrize("options", [{"stage": 2}, {"tensor": 2, "shard": 1}], ids=str)
def test_certificate_restores_all_state(ranks: Any, options: dict[str, Any]) -> None:
    """Weights, buffers, Python state, generators and logged values are those of a run without certificate."""
    certified = ranks(train_traced, 2, {**options, "certificate": "refuse"})
    without = ranks(train_traced, 2, {**options, "certificate": "off"})
    for one, other in zip(certified, without, strict=True):
        assert (one[-1], other[-1]) == (True, False)
        for kind in (0, 1):
            assert one[kind].keys() == other[kind].keys()
            assert all(torch.equal(value, other[kind][name]) for name, value in one[kind].items())
        assert one[2] == other[2]
        assert torch.equal(one[3], other[3])


class Adversaries(pl.LightningModule):
    """Two optimizers by hand, with what is toggled off in each turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.made = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        real = batch["tokens"][:, :8].float() / 64
        self.toggle_optimizer(second)
        loss = self.judge(self.made(real + torch.randn_like(real))).mean() - self.judge(real).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)
        self.toggle_optimizer(first)
        loss = -self.judge(self.made(real)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.made, self.judge)]


def train_adversaries(options: dict[str, Any], folder: str) -> Any:
    record = CertificateRecord(Console(quiet=True))
    trainer = make_trainer("hybrid", {**ON, **options}, max_steps=2, callbacks=[record], default_root_dir=folder)
    trainer.fit(Adversaries(), DataLoader(Texts(16), batch_size=4))
    return trainer.strategy.certificate.outcome, dict(trainer.strategy.whole_parameters())


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}, {"tensor": 2, "shard": 1}], ids=str)
def test_manual_optimization_is_compared_up_to_its_first_step(ranks, options, tmp_path):
    """With the gradients of the optimizer that steps; the run directory holds what was found, the run no trace."""
    results = ranks(train_adversaries, 2, options, str(tmp_path))
    without = ranks(train_adversaries, 2, {**options, "certificate": "off"}, str(tmp_path))
    assert all(torch.equal(value, without[0][1][name]) for name, value in results[0][1].items())
    outcomes = [outcome for outcome, _ in results]
    written = json.loads((tmp_path / "certificate.json").read_text())
    assert written["holds"]
    assert written["largest"] == list(outcomes[0].largest)
    for outcome in outcomes:
        assert outcome.holds
        assert outcome.parameters == 4
        assert outcome.losses is not None


def train_and_resume(folder: str) -> tuple[bool, ...]:
    made = []
    for steps, path, options in (
        (1, None, {}),
        (2, "state", {}),
        (2, "state", {"stage": 2}),
        (2, "state", {"bucket_mib": 1.0}),
    ):
        trainer = make_trainer("hybrid", {**ON, **options}, max_steps=steps, global_batch_size=8)
        trainer.fit(Traced(), DataLoader(Texts(32), batch_size=4), ckpt_path=path and f"{folder}/{path}")
        if path is None:
            trainer.save_checkpoint(f"{folder}/state")
        made.append(trainer.strategy.certificate.outcome is not None)
    return tuple(made)


def test_resuming_reuses_the_certificate(ranks: Any, tmp_path: Any) -> None:
    """The run state says for which layout, options and code its certificate was made."""
    assert set(ranks(train_and_resume, 2, str(tmp_path))) == {(True, False, True, True)}


def test_as_written_restores_the_module() -> None:
    """Classes, forwards and hooks that were replaced are there again for a while, on the same objects."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    written, before = AsWritten(module), module(torch.ones(1, 2))
    module[0].forward = lambda x: x  # type: ignore[method-assign]
    handle = module[1].register_forward_hook(lambda *_: torch.zeros(1))
    written.set_up()
    parameters = {name: nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
    with written.shown(parameters, torch.device("cpu")):
        assert torch.equal(module(torch.ones(1, 2)), before)
        assert module[0].weight is parameters["0.weight"]
    assert torch.equal(module(torch.ones(1, 2)), torch.zeros(1))
    assert handle.id in module[1]._forward_hooks


def test_as_written_stays_on_the_device() -> None:
    """What moves with a module, besides its parameters and buffers, is where setup has moved it to."""
    module, device = pl.LightningModule(), torch.device("meta")
    module.metric = MeanMetric()
    written = AsWritten(module)
    module.to(device)
    written.set_up()
    with written.shown({}, device):
        assert module.device == module.metric.device == module.metric.mean_value.device == device


class AddsGradients(torch.autograd.Function):
    """Returns its first input, and adds the gradient of a loss in backward, of any scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones(())


class Balanced(pl.LightningModule):
    """Adds an auxiliary loss in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return AddsGradients.apply(self.layer(batch), self.layer.weight.square().sum()).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_balanced(micro_batches: int) -> str:
    trainer = make_trainer("zero2", ON, max_steps=1, accumulate_grad_batches=micro_batches)
    try:
        trainer.fit(Balanced(), DataLoader(torch.ones(8, 4), batch_size=2))
    except RuntimeError as error:
        return str(error)
    return ""


def test_sees_gradients_that_accumulation_does_not_scale(ranks: Any) -> None:
    assert ranks(train_balanced, 2, 1) == ["", ""]
    for text in ranks(train_balanced, 2, 2):
        assert "gradients of 1 of 2 parameters differ" in text
        assert "accumulate_grad_batches=1" in text


class Growing(pl.LightningModule):
    """One more addition in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).mean()
        for _ in range(self.global_step):
            loss = loss + 1
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_growing() -> list[Any]:
    made = []

    def compare(self: Certificate, strategy: Any, batch: Any, batch_idx: int, reason: str, of_step: int) -> bool:
        self.checks.append(Check(of_step, reason, mock.Mock(seconds=0.0, written_seconds=0.0)))
        made.append(batch_idx)
        return True

    undrawn = mock.patch.object(SpotChecks, "is_drawn", return_value=False)
    with undrawn, mock.patch.object(Certificate, "_compare", compare), warnings.catch_warnings(record=True) as given:
        trainer = make_trainer("zero2", ON, max_steps=200, max_epochs=1)
        trainer.fit(Growing(), DataLoader(torch.ones(400, 4), batch_size=1))
    return [made, sum("Later changes are not compared" in str(each.message) for each in given)]


def test_a_step_that_always_changes_ends_the_comparisons(ranks: Any) -> None:
    """A certificate counts its own batch as known; then the 16 first steps are watched, and one of 16 later ones."""
    (made, warned), (other, _) = ranks(train_growing, 2)
    assert made == other == [*range(0, 18, 2), *range(33, 33 + 16 * 8, 16)]
    assert warned == 1


def test_factors_of_a_loss_are_no_change() -> None:
    loss = nn.Linear(2, 1)(torch.ones(2)).mean()
    pattern = pattern_of(loss.grad_fn)
    assert pattern_of((loss * 0.3 / 4).grad_fn) == pattern
    assert pattern_of((loss + 1).grad_fn) != pattern
    assert pattern_of((loss * loss).grad_fn) != pattern
