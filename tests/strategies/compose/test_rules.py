"""Errors of options that contradict each other or have no effect, without a module."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any, get_args

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer
from tests.parity.layout_modules import make_module
from tests.parity.layouts import Texts
from trainwright.core.layout import Layout
from trainwright.strategies.compose.engine_options import ATTENTION, EngineOptions
from trainwright.strategies.compose.hybrid import HybridStrategy
from trainwright.strategies.compose.hybrid_options import AXIS_OPTIONS, HybridOptions
from trainwright.strategies.compose.one_axis import PipelineStrategy
from trainwright.strategies.compose.rules import PLAN_PARTS, optimizer_problem, sync_batchnorm_problem
from trainwright.strategies.context.attention import Method
from trainwright.strategies.plan.model_plan import PlanConfig

REFUSED: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"pipeline": 2}, {"schedule": "zbw"}, ["schedule=zbw", "did you mean zbv?", "gpipe"]),
    ({"context": 2}, {"attention": "rings"}, ["attention=rings", "did you mean ring?", "ulysses"]),
    ({"pipeline": 2}, {"micro_batches": 0}, ["micro_batches=0", "at least 1"]),
    ({"pipeline": 2}, {"schedule": "looped_bfs", "stages_per_rank": 0}, ["stages_per_rank=0", "at least 1"]),
    ({"pipeline": 2}, {"split": "even"}, ["split=even", "split=[3,5]"]),
    ({"pipeline": 2}, {"split": [2, 0]}, ["split=[2,0]", "at least 1"]),
    ({"pipeline": 2}, {"split": [1, 1, 1]}, ["split=[1,1,1]", "names 3 stages", "make 2"]),
    ({"pipeline": 2}, {"batch_dims": {"x": "first"}}, ["batch_dims", "whole number"]),
    ({}, {"schedule": "zbv"}, ["schedule=zbv with pipeline=1 has no effect", "pipeline=2"]),
    ({}, {"micro_batches": 4}, ["micro_batches=4 with pipeline=1"]),
    ({}, {"stages_per_rank": 2}, ["stages_per_rank=2 with pipeline=1"]),
    ({}, {"stage_dtype": "bf16"}, ["stage_dtype=bf16 with pipeline=1"]),
    ({"pipeline": 2}, {"stage_dtype": "bf61"}, ["stage_dtype=bf61", "did you mean bf16", "fp16"]),
    ({}, {"split": [1, 1]}, ["split=[1,1] with pipeline=1"]),
    ({}, {"batch_dims": {"x": 1}}, ["batch_dims={x:1} with pipeline=1"]),
    ({"context": 2}, {"sequence_parallel": True}, ["sequence_parallel=true with tensor=1"]),
    ({}, {"loss_parallel": True}, ["loss_parallel=true with tensor=1"]),
    ({"tensor": 2}, {"attention": "gather"}, ["attention=gather with context=1"]),
    ({}, {"balance": False}, ["balance=false with context=1"]),
    ({"pipeline": 2}, {"schedule": "1f1b", "stages_per_rank": 2}, ["stages_per_rank=2", "exactly 1", "looped_bfs"]),
    ({"pipeline": 4}, {"micro_batches": 2}, ["micro_batches=2", "allowed are 4, 5"]),
    ({"pipeline": 2}, {"schedule": "zbv", "stages_per_rank": 3}, ["stages_per_rank=3", "exactly 2"]),
    ({"pipeline": 2}, {"schedule": "zbv", "compile": True}, ["schedule=zbv with compile=true"]),
    ({"tensor": 2}, {"find_unused_parameters": True}, ["find_unused_parameters=true with stage 3", "stage=2"]),
    ({"tensor": 2, "shard": 1}, {"offload": "parameters"}, ["offload=parameters with shard=1", "offload=optimizer"]),
    ({"tensor": 2}, {"plan": {"block": ["a.*"]}}, ["plan.block", "did you mean blocks?"]),
    ({}, {"plan": {"blocks": ["a.*"]}}, ["plan with pipeline, context, tensor and expert all 1"]),
    ({"tensor": 2}, {"plan": {"blocks": ["a.*"]}, "blocks": ["a.*"]}, ["blocks and plan.blocks are both given"]),
]  # fmt: skip
FINE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tensor": 2}, {"sequence_parallel": True, "loss_parallel": True, "plan": {"blocks": ["a.*"]}}),
    ({"pipeline": 2}, {"schedule": "zbv", "micro_batches": 4, "split": [1, 1, 1, 1], "batch_dims": {"x": None}}),
    ({"pipeline": -1, "shard": 1}, {"schedule": "interleaved_1f1b", "stages_per_rank": 3}),
    ({"context": 2}, {"attention": "ulysses", "balance": False}),
    ({"tensor": 2, "shard": 2}, {"offload": "parameters"}),
]


@pytest.mark.parametrize(("axes", "options", "parts"), REFUSED)
def test_refused(axes, options, parts):
    [problem] = HybridOptions(**axes, **options).problems_of_call()
    for part in ("strategy.", *parts):
        assert part in problem.replace("strategy.", "") or part in problem
    with pytest.raises(ValueError, match=r".") as error:
        HybridStrategy(**axes, **options)
    assert str(error.value) == f"HybridStrategy: {problem.replace('strategy.', '')}"


@pytest.mark.parametrize(("axes", "options"), FINE)
def test_fine(axes, options):
    HybridStrategy(**axes, **options)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError, match=r"zbw") as error:
        PipelineStrategy(schedule="zbw", loss_parallel=True, attention="gather")
    assert "loss_parallel" in str(error.value)
    assert "attention=gather" in str(error.value)


def test_every_option_has_a_rule():
    """A new option needs a rule, or an effect under every layout."""
    everywhere = {"blocks", "plan"}
    assert {item.name for item in fields(EngineOptions)} - everywhere == set(AXIS_OPTIONS)
    assert get_args(Method) == ATTENTION
    assert {item.name for item in fields(PlanConfig)} == set(PLAN_PARTS)


def test_options_import_no_torch():
    code = "import sys, trainwright.strategies.compose.hybrid_options; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_batchnorm_and_optimizers():
    assert sync_batchnorm_problem(Layout(shard=2, expert=2)) == []
    assert "deadlock" in str(sync_batchnorm_problem(Layout(pipeline=2, tensor=2)))
    assert "several times" in str(sync_batchnorm_problem(Layout(context=2)))
    assert optimizer_problem(Layout(replicate=2), "LBFGS") == []
    assert optimizer_problem(Layout(tensor=2), "Adafactor") == []
    assert "LBFGS with pipeline=2 tensor=2" in str(optimizer_problem(Layout(tensor=2, pipeline=2), "LBFGS"))


# ---- on ranks -----------------------------------------------------------------------------------------------------


class _Manual(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.inner = make_module("gpt")
        self.training_step = self.inner.training_step  # type: ignore[method-assign]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]


COMPANIONS: list[tuple[str, dict[str, Any], str]] = [
    ("swa", {"expert": 2, "shard": 2}, "StochasticWeightAveraging averages a copy"),
    ("ema", {"expert": 2, "shard": 2}, "EMAWeightAveraging averages a copy"),
    ("sync_batchnorm", {"pipeline": 2}, "sync_batchnorm=true with pipeline=2"),
    ("sync_batchnorm", {"tensor": 2}, "sync_batchnorm=true with tensor=2"),
    ("manual", {"pipeline": 2}, "Manual optimization"),
    ("manual", {"tensor": 2, "sequence_parallel": True}, "Manual optimization"),
    ("open", {"pipeline": -1, "shard": 2, "micro_batches": 3}, "micro_batches=3 with pipeline=1 has no effect"),
]


def refusals() -> list[str]:
    return [_refusal(kind, {"shard": 1, **options}) for kind, options, _ in COMPANIONS]


def _refusal(kind: str, options: dict[str, Any]) -> str:
    callbacks: dict[str, Any] = {
        "swa": lambda: [StochasticWeightAveraging(0.1)],
        "ema": lambda: [EMAWeightAveraging(device="cpu")],
    }
    modules: dict[str, Any] = {"manual": _Manual}
    trainer = make_trainer(
        "hybrid",
        options,
        max_steps=1,
        max_epochs=-1,
        callbacks=callbacks.get(kind, list)(),
        sync_batchnorm=kind == "sync_batchnorm",
    )
    try:
        trainer.fit(
            modules.get(kind, lambda: make_module("mixtral" if "expert" in options else "gpt"))(),
            DataLoader(Texts(8), batch_size=4),
        )
    except ValueError as error:
        return str(error)
    return "trained"


def test_unsupported_callbacks_and_settings(ranks):
    for found in ranks(refusals, 2, timeout=90):
        for (kind, options, part), message in zip(COMPANIONS, found, strict=True):
            assert part in message, (kind, options, message)
