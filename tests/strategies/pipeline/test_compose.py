"""Changes of what is trained, and errors in the middle of a step, in the pipeline engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.strategies.pipeline.models import (
    Model,
    build,
    engine_of,
    make_batch,
    reference,
    train,
    worst_gradient,
)

Ranks = Callable[..., list[Any]]


class Fragile(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx and batch["ids"][0, 0] == batch["stop"]:
            raise ArithmeticError("in the middle")
        return super().training_step(batch, batch_idx)


def broken() -> Any:
    """One rank with two stages, so that no other is left waiting."""
    model = build(Fragile, 4)
    batch = {**make_batch(), "stop": torch.tensor(-1)}
    _, gradients = reference(model, batch)
    engine = engine_of(model, "interleaved_1f1b", 4)
    log = model.log
    train(engine, batch)
    model.zero_grad()
    bad = {**batch, "stop": batch["ids"][4, 0]}
    with pytest.raises(ArithmeticError, match="in the middle"):
        engine.train((bad, 1), {}, batch=bad, scale=lambda loss, share: loss * share)
    assert model.log == log
    assert all(stage.live == 0 for stage in engine.stages)
    model.zero_grad()
    train(engine, batch)
    return worst_gradient(model, engine, gradients)


def test_after_an_error_the_next_step_is_right(ranks: Ranks) -> None:
    assert ranks(broken, 1, timeout=60)[0] < 1e-6


def thawed() -> Any:
    model = build(Model, 4)
    batch = make_batch()
    _, gradients = reference(model, batch)
    trained = [model.embed, *list(model.layers)[:2]]
    for module in trained:
        module.requires_grad_(False)
    engine = engine_of(model)
    train(engine, batch)
    frozen = [name for name, p in model.named_parameters() if p.grad is None]
    model.zero_grad()
    for module in trained:
        module.requires_grad_(True)
    engine.refresh()
    train(engine, batch)
    return len(frozen), worst_gradient(model, engine, gradients)


def test_what_is_trained_may_change(ranks: Ranks) -> None:
    (frozen, first), (none, second) = ranks(thawed, 2, timeout=60)
    assert frozen > 0
    assert none == 0
    assert max(first, second) < 1e-6
