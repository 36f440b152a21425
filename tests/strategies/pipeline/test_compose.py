"""The pipeline engine beside sharding, changes of what is trained, and errors in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.strategies.pipeline.models import (
    Model,
    build,
    engine_of,
    make_batch,
    plan_of,
    reference,
    train,
    worst_gradient,
)
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.engine import PipelineEngine
from trainwright.strategies.pipeline.schedules import split_blocks, stages_of_rank, stages_per_rank_of

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


class Root(Model):
    """Whose forward runs a method by name, as a strategy that shards the root needs it."""

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


def sharded(schedule: str) -> Any:
    """Pipeline of 2 x shards of 2: gradients, evaluation of the whole against one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    group, shard = mesh.get_group("pipeline"), mesh.get_local_rank("shard")
    model = build(Root, 4, tied=True)
    batches = [make_batch(4, 6, seed) for seed in range(2)]
    losses, gradients = reference(model, *batches, scale=0.5)
    plan, ranks = plan_of(model), 2
    stages = ranks * stages_per_rank_of(schedule, None)
    rank = dist.get_rank(group)
    spans = split_blocks([1.0] * 4, stages)
    cut = PipelineCut(model, plan, spans, stages_of_rank(rank, ranks, stages, schedule))
    cut.apply()
    for index, layer in enumerate(model.layers):
        if cut.owns_block(index):
            fully_shard(layer, mesh=mesh["shard"])
    root: Any = fully_shard(model, mesh=mesh["shard"])
    box: list[PipelineEngine] = []

    @contextmanager
    def around(stage: int, last: bool) -> Iterator[None]:
        # Reduced in the last micro-batch only; a tied root is used by two stages of a rank at most.
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        yield

    def run(method: str, args: Any, kwargs: Any) -> Any:
        return root(lambda: box[0].call(lambda: getattr(model, method)(*args, **kwargs)))

    engine = PipelineEngine(
        model, cut, group=group, schedule=schedule, micro_batches=2, device=torch.device("cpu"), run=run,
        around_backward=around, whole=lambda name: dict(model.named_parameters())[name].full_tensor(),
    )  # fmt: skip
    box.append(engine)
    engine.attach()
    loss = train(engine, batches[shard])
    worst = 0.0
    for name, stages_of in sorted(cut.holders.items()):
        if name in cut.owned:
            parameter = dict(model.named_parameters())[name]
            assert isinstance(parameter.grad, DTensor)
            whole = parameter.grad.full_tensor()
            if len(stages_of) > 1:
                dist.all_reduce(whole, group=group)
            worst = max(worst, float((whole - gradients[name]).abs().max()))
    with torch.no_grad(), engine.evaluating(lambda name: dict(model.named_parameters())[name].full_tensor()):
        logits = engine.relay(lambda: root(lambda: model.logits(batches[shard]["ids"])))
    wanted = build(Root, 4, tied=True).logits(batches[shard]["ids"])
    return abs(float(loss / losses[shard]) - 1), worst, float((logits - wanted).abs().max())


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_beside_sharded_parameters(ranks: Ranks, schedule: str) -> None:
    for errors in ranks(sharded, 4, schedule, timeout=60):
        assert max(errors) < 1e-6
