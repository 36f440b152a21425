"""Errors of local updates at composition and in constructors."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from tests.strategies.local_updates.cases import fit
from trainwright import DiLoCoStrategy, LocalSGDStrategy, compose
from trainwright.command.verify_options import VerifyOptions
from trainwright.launch.checks.validate import validate
from trainwright.launch.worker import build_trainer
from trainwright.strategies.compose.world import Surroundings
from trainwright.strategies.contract.options import PlannedRun
from trainwright.strategies.local_updates.options import LocalSGDOptions
from trainwright.strategies.local_updates.replicas import UpdateSchedule, fragment_of
from trainwright.tools.verify.verify import problems_of

REFUSED: list[tuple[list[str], tuple[str, ...]]] = [
    (["strategy=local_sgd", "strategy.sync_every=0"], ("strategy.sync_every=0", "at least 1")),
    (["strategy=diloco", "strategy.fragments=9", "strategy.sync_every=8"], ("fragments=9", "fragments=8")),
    (["strategy=diloco", "strategy.fragments=5"], ("fragments=5", "4 block(s)", "strategy.fragments=4")),
    (["strategy=diloco", "strategy.overlap_steps=50"], ("overlap_steps=50", "overlap_steps=49")),
    (["strategy=diloco", "strategy.mixing=1.0"], ("mixing=1.0", "below 1")),
    (["strategy=diloco", "strategy.outer_lr=0"], ("outer_lr=0", "above 0")),
    (["strategy=diloco", "strategy.outer_momentum=0"], ("outer_nesterov=true", "outer_nesterov=false")),
    (["strategy=diloco", "strategy.compression=bf61"], ("bf61", "did you mean bf16")),
    (["strategy=diloco", "devices=1"], ("strategy.replicate=1", "devices=2")),
    (["strategy=local_sgd", "strategy.replicate=1", "strategy.shard=2"], ("shard 2", "no replicas")),
    (["strategy=local_sgd", "monitor=thorough"], ("monitor.replica_check", "strategy=diloco")),
    (["strategy=local_sgd", "trainer.sync_batchnorm=true"], ("sync_batchnorm", "Leave it out")),
    (["strategy=local_sgd", "balance=auto"], ("balance=auto", "balance=none")),
    (["strategy=diloco", "balance=fixed", "balance.shares=[1,3]"], ("balance=fixed", "balance=none")),
    (["strategy=local_sgd", "compression=int8"], ("compression=int8 with local_sgd", "strategy=diloco")),
    (["strategy=diloco", "compression=onebit"], ("100 warmup_steps", "strategy.compression=onebit")),
    (
        ["strategy=diloco", "compression=bf16", "strategy.compression=int8"],
        ("compression=none", "both set the compression"),
    ),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=lambda value: " ".join(value) if value else None)
def test_composition_errors(tmp_path, overrides, parts):
    cfg = compose("gpt", ["devices=2", "accelerator=cpu", f"run_dir={tmp_path}", *overrides])
    problems = validate(cfg, Surroundings())
    assert any(all(part in problem for part in parts) for problem in problems), problems


def test_valid_configurations(tmp_path: Any) -> None:
    cfg = compose("diloco_gpt", ["accelerator=cpu", f"run_dir={tmp_path}", "strategy.fragments=4"])
    assert validate(cfg, Surroundings()) == []
    assert "automatic_optimization" in next(LocalSGDOptions().module_problems(PlannedRun(cfg), Manual))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "option"), [("bf16", {}), ("topk", {"ratio": 0.01}), ("powersgd", {"rank": 4})])
def test_group_compression_applies_to_outer_gradients(tmp_path, name, option):
    overrides = ["devices=2", "accelerator=cpu", f"run_dir={tmp_path}", "strategy=diloco", f"compression={name}"]
    cfg = compose("gpt", overrides)
    assert validate(cfg, Surroundings()) == []
    strategy = build_trainer(cfg).strategy
    assert isinstance(strategy, DiLoCoStrategy)
    assert strategy.replicas._choice is not None
    assert strategy.replicas._choice.name == name
    assert option.items() <= dict(strategy.replicas._choice.options).items()


_AS_LOCAL_SGD = ["strategy.outer_lr=1", "strategy.outer_momentum=0", "strategy.outer_nesterov=false"]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("overrides", "is_refused"), [
    (["strategy=diloco"], True),
    (["strategy=diloco", "strategy.sync_every=1"], True),
    (["strategy=local_sgd", "strategy.warmup_steps=3"], True),
    (["strategy=diloco", "strategy.sync_every=1", *_AS_LOCAL_SGD, "compression=bf16"], True),
    (["strategy=diloco", "strategy.sync_every=1", *_AS_LOCAL_SGD], False),
    (["strategy=local_sgd", "strategy.sync_every=1"], False),
    (["strategy=diloco", "strategy.warmup_steps=4"], False),
    (["strategy=ddp"], False),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)  # fmt: skip
def test_verify_refuses_configurations_that_differ_from_one_process(overrides: list[str], is_refused: bool) -> None:
    problems = problems_of(compose("gpt", ["devices=2", *overrides]), VerifyOptions())
    assert [("do not train as one process does" in problem) for problem in problems] == [True] * is_refused


class Manual(pl.LightningModule):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(("make", "part"), [
    (lambda: LocalSGDStrategy(compression="bf16"), "strategy=diloco"),
    (lambda: DiLoCoStrategy(sync_every=4, overlap_steps=4), "overlap_steps=4"),
    (lambda: DiLoCoStrategy(compression={"name": "topk", "ratio": 2}), "ratio"),
    (lambda: DiLoCoStrategy(compression={"name": "topk", "warmup_steps": 2}), "has no effect"),
])  # fmt: skip
def test_constructor_errors(make: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        make()


def fit_with_average() -> None:
    with pytest.raises(ValueError, match="EMAWeightAveraging averages over the steps of one replica"):
        fit("local_sgd", {}, callbacks=[EMAWeightAveraging()])


def test_weight_averaging_callbacks_are_refused(ranks: Any) -> None:
    ranks(fit_with_average, 2)


def test_fragment_schedule() -> None:
    schedule = UpdateSchedule(sync_every=6, fragments=3, warmup_steps=6)
    assert [schedule.due(step) for step in range(1, 14)] == [None] * 7 + [1, None, 2, None, 0, None]
    names = ["embed.w", "blocks.0.w", "blocks.1.w", "blocks.2.w", "norm.w"]
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert [fragment_of(name, blocks, names, 2) for name in names] == [0, 0, 1, 0, 1]
