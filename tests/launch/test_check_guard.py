"""Loss guards that are refused when the configuration is composed."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from trainwright.callbacks.guard.options import guard_refusals

GUARD = {"_target_": "trainwright.callbacks.guard.loss_guard.LossGuard", "policy": "rollback"}


def refusals(guard: dict[str, Any], callbacks: dict[str, Any] | None = None, optimizer: str = "AdamW") -> list[str]:
    cfg = {"guard": guard, "callbacks": callbacks or {}, "optimizer": {"_target_": f"torch.optim.{optimizer}"}}
    return guard_refusals(OmegaConf.create(cfg))


def test_possible():
    assert refusals({}) == []
    assert refusals({"loss": GUARD}) == []
    assert refusals({"loss": None}, {"own": {"_target_": "package.Other", "policy": "x"}}) == []
    assert refusals({"loss": {**GUARD, "policy": "skip"}}, {"swa": {"_target_": "a.StochasticWeightAveraging"}}) == []


@pytest.mark.parametrize(("arguments", "words"), [
    (({"loss": {**GUARD, "policy": "again"}},), "guard.loss: policy='again' (allowed: skip, rollback, stop)"),
    (({"loss": {**GUARD, "keep_snapshots": 0}},), "guard.loss: keep_snapshots=0 (allowed: 1 or more)"),
    (({"loss": GUARD}, {"mine": GUARD}), "guard.loss and callbacks.mine are both a LossGuard; type guard=none"),
    (({"loss": GUARD}, None, "LBFGS"), "guard.loss with optimizer LBFGS"),
    (({"loss": GUARD}, {"swa": {"_target_": "a.StochasticWeightAveraging"}}), "type guard=skip"),
])  # fmt: skip
def test_impossible(arguments, words):
    [problem] = refusals(*arguments)
    assert words in problem
