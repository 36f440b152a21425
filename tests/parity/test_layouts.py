"""Parity of every layout with one process: losses, gradients and parameters by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.parity.harness import Record, differences, make_trainer
from tests.parity.layout_modules import make_module
from tests.parity.layouts import LayoutCase as Case
from tests.parity.layouts import Texts, assert_layouts, run
from tests.parity.layouts import reference as bare_loop
from trainwright.strategies.pipeline.schedules import CHOICES

EVEN = {"length": 8}  # a Hugging Face model reads all it is given; 8 positions divide by 4 and by 2 x 2

TOKENS = {"loss_weighting": "tokens"}
STAGES, TENSOR = {"pipeline": 2, "shard": 2}, {"tensor": 2, "shard": 2}

TWO: dict[str, Case] = {
    "tensor, gpt": Case("gpt-untied", {"tensor": 2}, clip=0.2),
    "tensor, gpt tied": Case("gpt", {"tensor": 2, "sequence_parallel": True}),
    "tensor, trained number": Case("tempered", {"tensor": 2, "loss_parallel": True}, clip=0.2),
    "context, trained number": Case("tempered", {"context": 2, "shard": 1}),
    "pipeline, trained number": Case("tempered", {"pipeline": 2, "plan": {"last": ["net.temperature"]}}),
    "tensor, encoder": Case("encoder", {"tensor": 2}),
    "tensor, llama, loss parallel": Case(
        "llama", {"tensor": 2, "sequence_parallel": True, "loss_parallel": True}, **EVEN
    ),
    "tensor, gpt2": Case("gpt2-small", {"tensor": 2, "activation_checkpointing": "full"}, clip=0.2),
    "tensor, mixtral": Case("mixtral", {"tensor": 2}),
    "context, gpt, ring": Case("gpt-small", {"context": 2, "shard": 1}, clip=0.2),
    "context, llama, ulysses": Case("llama", {"context": 2, "shard": 1, "attention": "ulysses"}, **EVEN),
    "context, qwen2, gather": Case("qwen2", {"context": 2, "shard": 1, "attention": "gather"}, **EVEN),
    "context, stage 1": Case("gpt-small", {"context": 2, "shard": 1, "stage": 1, "balance": False}),
    "expert, mixtral": Case("mixtral", {"expert": 2}, clip=0.2),
    "expert, stage 2": Case(
        "mixtral", {"expert": 2, "stage": 2, "activation_checkpointing": "full"}, accumulation=2, clip=0.3
    ),
    "pipeline, odd module": Case("odd", {"pipeline": 2, "micro_batches": 4}, clip=0.2),
    "pipeline, uneven blocks": Case("odd", {"pipeline": 2, "split": [1, 4]}),
    "pipeline, encoder": Case("encoder", {"pipeline": 2}, accumulation=2),
    "pipeline, llama": Case("llama", {"pipeline": 2, "activation_checkpointing": "full"}),
    "pipeline, mixtral": Case("mixtral", {"pipeline": 2}),
    "pipeline, uneven data": Case("gpt", {"pipeline": 2, "micro_batches": 4}, samples=21, steps=5),
    "pipeline, by tokens": Case("masked", {"pipeline": 2, "micro_batches": 4}, accumulation=2, trainer=TOKENS),
    "context, by tokens": Case("masked", {"context": 2, "shard": 1}, accumulation=2, trainer=TOKENS),
    **{
        f"pipeline, {schedule}": Case("gpt2", {"pipeline": 2, "schedule": schedule, "micro_batches": 4})
        for schedule in CHOICES
    },
}

FOUR: dict[str, Case] = {
    "tensor x shard": Case("llama", {**TENSOR, "sequence_parallel": True}, clip=0.2, **EVEN),
    "tensor x shard, offload": Case("gpt2-small", {**TENSOR, "offload": "optimizer"}, accumulation=2),
    "tensor x shard, stage 1": Case("gpt2-small", {**TENSOR, "stage": 1}, accumulation=2),
    "tensor x replicate": Case("gpt-untied", {"tensor": 2, "replicate": 2, "shard": 1}, clip=0.2),
    "pipeline x shard": Case("gpt2-small", STAGES, accumulation=2, clip=0.2),
    "pipeline x shard, stage 1, zero bubble": Case(
        "gpt2", {**STAGES, "stage": 1, "schedule": "interleaved_zero_bubble"}, accumulation=2
    ),
    "pipeline x shard, stage 2, unused parameters": Case(
        "gpt2-small", {**STAGES, "stage": 2, "find_unused_parameters": True}, accumulation=2, clip=0.2
    ),
    "pipeline x shard, zbv": Case("gpt2", {**STAGES, "schedule": "zbv"}, samples=20, steps=6),
    "pipeline x shard, offload": Case("gpt-small", {**STAGES, "offload": "parameters"}, clip=0.2),
    "pipeline x tensor": Case("llama", {"pipeline": 2, "tensor": 2, "sequence_parallel": True}, **EVEN),
    "pipeline x tensor, encoder": Case("encoder", {"pipeline": 2, "tensor": 2}, clip=0.2),
    "pipeline x context": Case("gpt", {"pipeline": 2, "context": 2, "shard": 1}, clip=0.2),
    "pipeline x expert": Case("mixtral", {**STAGES, "expert": 2}, clip=0.2),
    "pipeline x shard, by tokens": Case("masked", STAGES, accumulation=2, clip=0.2, trainer=TOKENS),
    "pipeline 4": Case("gpt", {"pipeline": 4}, clip=0.2),
    "context x shard": Case("gpt-small", {"context": 2, "shard": 2}, accumulation=2, clip=0.2),
    "context x tensor": Case("gpt-small", {"context": 2, "tensor": 2, "shard": 1, "sequence_parallel": True}),
    "expert x shard": Case("mixtral", {"expert": 2, "shard": 4}),
    "expert x tensor": Case("mixtral", {"expert": 2, "shard": 2, "tensor": 2}),
    "expert x context": Case("mixtral", {"expert": 4, "shard": 2, "context": 2}, **EVEN),
}

EIGHT: dict[str, Case] = {
    "pipeline x shard x tensor": Case("llama", {**STAGES, "tensor": 2}, clip=0.2),
    "pipeline x replicate x context": Case("gpt", {"pipeline": 2, "replicate": 2, "context": 2, "shard": 1}),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", list(TWO))
def test_two_ranks(ranks, name):
    assert_layouts(ranks, 2, [TWO[name]])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(FOUR))
def test_four_ranks(ranks, name):
    assert_layouts(ranks, 4, [FOUR[name]])


@pytest.mark.thorough
def test_eight_ranks(ranks):
    assert_layouts(ranks, 8, list(EIGHT.values()), timeout=240)


# ---- Precision ------------------------------------------------------------------------------------------------------


def run_at(precision: str, case: Case) -> Record:
    return run(replace(case, trainer={"precision": precision}))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("network", "world_size", "options", "precision"),
    [
        (*layout, precision)
        for precisions, *layout in [
            (("bf16-mixed", "bf16-true"), "llama", 2, {"pipeline": 2, "shard": 1}),
            (("bf16-true", "16-mixed"), "gpt-untied", 4, {**TENSOR, "sequence_parallel": True}),
            (("bf16-mixed", "16-mixed"), "gpt-untied", 4, {**STAGES, "stage": 1}),
            (("bf16-true", "16-mixed"), "gpt-untied", 2, {"context": 2, "shard": 1}),
        ]
        for precision in precisions
    ],
)
def test_precisions(ranks, reference, precision, network, world_size, options):
    """Within rounding of one process at the same precision; the fp16 scaler skips the same steps on every rank."""
    case = Case(network, options, clip=0.5)
    alone = reference(run_at, precision, replace(case, strategy="single", options={}), init_group=False)
    results = ranks(run_at, world_size, precision, case)
    for record in results:
        assert record.losses == pytest.approx(alone.losses, rel=2e-2)
        assert record.parameters.keys() == alone.parameters.keys()
        for name, parameter in alone.parameters.items():
            assert torch.allclose(record.parameters[name].float(), parameter.float(), atol=2e-2), name
            assert record.parameters[name].dtype == parameter.dtype
            assert torch.equal(record.parameters[name], results[0].parameters[name])


# ---- Outputs, validation and prediction -----------------------------------------------------------------------------


class Seen(pl.Callback):
    """Outputs, logged values and learning rates that callbacks of a rank see."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.logged: list[dict[str, float]] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append({k: v.tolist() if hasattr(v, "tolist") else v for k, v in outputs.items()})
        self.logged.append({name: value.item() for name, value in trainer.callback_metrics.items()})
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def strategy_of(options: dict[str, Any] | None) -> str:
    return "single" if options is None else "hybrid"


def train_odd(options: dict[str, Any] | None) -> tuple[list[Any], list[dict[str, float]], list[float]]:
    seen = Seen()
    trainer = make_trainer(strategy_of(options), options, max_steps=3, callbacks=[seen])
    trainer.fit(make_module("odd"), DataLoader(Texts(24), batch_size=8))
    return seen.outputs, seen.logged, seen.rates


def test_outputs_and_logged_values_reach_every_stage(ranks):
    ((outputs_alone, logged_alone, rates_alone),) = ranks(train_odd, 1, None, init_group=False)
    for outputs, logged, rates in ranks(train_odd, 2, {"pipeline": 2, "micro_batches": 3, "shard": 1}):
        assert rates == rates_alone
        for ours, theirs in zip(logged, logged_alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        for ours, theirs in zip(outputs, outputs_alone, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["best"] == theirs["best"]
            # Other values are not merged: one per micro-batch.
            assert ours["note"] == ["text"] * 3


def evaluate(network: str, options: dict[str, Any] | None) -> tuple[dict[str, float], dict[str, float], list[Any]]:
    within = {"val_check_interval": 2, "check_val_every_n_epoch": None}
    trainer = make_trainer(strategy_of(options), options, max_steps=2, **within)
    module = make_module(network)
    length = 9 if network in ("gpt", "tempered") else 8  # ours takes the last position for a label only
    loader = DataLoader(Texts(16, length), batch_size=4)
    trainer.fit(module, loader, DataLoader(Texts(10, length), batch_size=2))
    fitted = {name: value.item() for name, value in trainer.callback_metrics.items()}
    validated = trainer.validate(module, DataLoader(Texts(10, length), batch_size=2), verbose=False)[0]
    predicted = trainer.predict(module, DataLoader(Texts(6, length), batch_size=2))
    return fitted, validated, [batch.tolist() for batch in predicted]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("network", "world_size", "options"),
    [
        ("llama", 2, {"pipeline": 2, "shard": 1}),
        ("gpt", 2, {"pipeline": 2, "shard": 1, "schedule": "zbv"}),
        # Whole on a stage that does not own it, a parameter of one element is as small as what stands for it.
        ("tempered", 2, {"pipeline": 2, "shard": 1, "plan": {"last": ["net.temperature"]}}),
        ("llama", 2, {"tensor": 2, "shard": 1, "sequence_parallel": True, "loss_parallel": True}),
        ("gpt", 2, {"context": 2, "shard": 1}),
        ("llama", 4, {"pipeline": 2, "tensor": 2, "shard": 1}),
    ],
)
def test_validation_and_prediction(ranks, reference, network, world_size, options):
    alone = reference(evaluate, network, None, init_group=False)
    for found in ranks(evaluate, world_size, network, options):
        for ours, theirs in zip(found[:2], alone[:2], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert found[2] == alone[2]


def predict(options: dict[str, Any] | None) -> list[list[int]]:
    trainer = make_trainer(strategy_of(options), options)
    return torch.cat(trainer.predict(make_module("llama"), DataLoader(Texts(6, 8), batch_size=2))).tolist()


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"tensor": 2, "shard": 2}, STAGES])
def test_samples_that_ranks_share_are_predicted_once(ranks, reference, options):
    alone = reference(predict, None, init_group=False)
    assert ranks(predict, 4, options) == [alone] * 4


def test_a_layout_works_in_lightnings_own_trainer(ranks):
    case = Case("llama", {"pipeline": 2, "tensor": 2, "shard": 1}, accumulation=2)
    for record in ranks(run, 4, case, with_lightning=True):
        assert not differences(record, bare_loop(case))
