"""Training through the stages of a pipeline equals one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.strategies.pipeline_models import (
    Model,
    build,
    engine_of,
    make_batch,
    reference,
    train,
    worst_gradient,
)

ALL = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]


def errors(schedule: str, blocks: int, micro_batches: int, samples: list[tuple[int, int]], options: Any) -> Any:
    """Worst relative error of the losses, worst error of a gradient, on this rank."""
    model = build(Model, blocks, **options)
    batches = [make_batch(n, length, seed) for seed, (n, length) in enumerate(samples)]
    losses, gradients = reference(model, *batches, scale=0.5)
    engine = engine_of(model, schedule, micro_batches)
    found = [train(engine, batch, scale=lambda loss: loss * 0.5) for batch in batches]
    assert not any(loss.requires_grad for loss in found)
    loss_error = max(abs(float(a) / float(b) - 1) for a, b in zip(found, losses, strict=True))
    return loss_error, worst_gradient(model, engine, gradients)


def check(results: list[Any]) -> None:
    for loss_error, gradient_error in results:
        assert loss_error < 1e-6
        assert gradient_error < 1e-6


@pytest.mark.parametrize("schedule", ALL)
def test_a_schedule_computes_what_one_process_does(ranks: Callable[..., list[Any]], schedule: str) -> None:
    check(ranks(errors, 2, schedule, 5, 4, [(8, 6)] * 2, {}, timeout=60))
