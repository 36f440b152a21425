"""Evaluation in a pipeline matches one process on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.strategies.pipeline.models import Model, build, engine_of, make_batch, plan_of, train

Ranks = Callable[..., list[Any]]


def evaluated(schedule: str, style: str, blocks: int) -> Any:
    """Return the worst error of logits of several passes and shapes, and check that ghosts are restored."""
    model = build(Model, blocks, style=style, tied=True)
    twin = build(Model, blocks, style=style, tied=True)
    batches = [make_batch(2, 5, seed)["ids"] for seed in range(2)]
    asked: list[str] = []

    def whole(name: str) -> Any:
        asked.append(name)
        return dict(model.named_parameters())[name]

    engine = engine_of(model, schedule)
    engine._steps.whole = whole  # type: ignore[method-assign]
    train(engine, make_batch())

    def step() -> list[Any]:
        """Generate greedily, one pass per token."""
        found = []
        for ids in batches:
            for _ in range(3):
                logits = model.logits(ids)
                found.append(logits)
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        return found

    names = list(dict(model.named_parameters()))
    with torch.no_grad():
        with engine.evaluating():
            found = engine.relay(step)
            again = engine.relay(lambda: model.logits(batches[0]))
            assert list(dict(model.named_parameters())) == names
        model_logits, model.logits = model.logits, twin.logits  # type: ignore[method-assign]
        wanted = step()
        model.logits = model_logits  # type: ignore[method-assign]
    worst = max(float((a - b).abs().max()) for a, b in zip([*found, again], [*wanted, wanted[0]], strict=True))
    assert set(asked) <= engine.cut.owned
    ghosts = [n for n in engine.cut.holders if n not in engine.cut.owned]
    for name in ghosts:
        owner, key = engine.cut.slots(name)[0]
        assert owner.__dict__[key].untyped_storage().nbytes() == 4
    train(engine, make_batch())
    return worst


@pytest.mark.sample(2)
@pytest.mark.parametrize(("world", "schedule", "style", "blocks"), [
    (2, "1f1b", "tensor", 3), (2, "interleaved_1f1b", "dict", 4), (2, "zbv", "tuple", 5),
    (4, "interleaved_1f1b", "tensor", 8),
])  # fmt: skip
def test_relay_matches_one_process(ranks: Ranks, world: int, schedule: str, style: str, blocks: int) -> None:
    assert max(ranks(evaluated, world, schedule, style, blocks, timeout=60)) < 1e-6


def drawn(noise: float) -> list[float]:
    """Return the loss of a traced and of a later evaluation with dropout in blocks, and a number drawn after each."""
    model = build(Model, 2)
    for layer in model.layers:
        layer.outer = torch.nn.Sequential(layer.outer, torch.nn.Dropout(0.5))
    engine = engine_of(model, "1f1b")

    def step() -> float:
        x = model.embed(make_batch()["ids"])
        x = x + noise * torch.randn_like(x) if noise else x
        for layer in model.layers:
            x = layer(x)
        return float(x.square().mean())

    found = []
    with torch.no_grad(), engine.evaluating():
        for _ in range(2):
            torch.manual_seed(5)
            found += [engine.relay(step), float(torch.rand(()))]
    return found


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_traced_evaluation_draws_as_later_ones(ranks: Ranks, noise: float) -> None:
    for *traced, value, number in ranks(drawn, 2, noise, timeout=60):
        assert traced == [value, number]


class Normed(Model):
    """Running statistics before the blocks."""

    def __init__(self) -> None:
        super().__init__(2)
        self.batch_norm = torch.nn.BatchNorm1d(8)

    def hidden(self, ids: Any) -> Any:
        x = self.batch_norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def statistics() -> Any:
    model = build(Normed)
    plan = plan_of(model, first=("embed", "batch_norm"))
    with pytest.raises(RuntimeError, match="'batch_norm.running_mean' .BatchNorm1d. depending on .*micro_batches=1"):
        train(engine_of(build(Normed), "1f1b", 2, plan), make_batch())
    engine = engine_of(model, "1f1b", 1, plan)
    train(engine, make_batch())
    with engine.evaluating():
        return model.batch_norm.running_mean.tolist(), engine.cut.buffer_stages["batch_norm.running_mean"]


def test_buffers_before_the_blocks_come_from_the_first_stage(ranks: Ranks) -> None:
    (first, stage), (second, _) = ranks(statistics, 2, timeout=60)
    assert stage == 0
    assert first == second
    assert any(first)


def relay_errors() -> str:
    model = build(Model, 4)
    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda x, past_key_values=None, forward=forward: forward(x)  # type: ignore[misc]
    engine = engine_of(model)
    cache = object()

    def passes(count: int, caches: list[Any]) -> None:
        for i in range(count):
            x = model.embed(make_batch()["ids"])
            for layer in model.layers:
                x = layer(x, past_key_values=caches[i])

    with torch.no_grad(), engine.evaluating():
        engine.relay(lambda: passes(2, [object(), object()]))
        with pytest.raises(RuntimeError, match="use_cache=False") as raised:
            engine.relay(lambda: passes(2, [cache, cache]))
    model = build(Model, 4)
    engine = engine_of(model, "1f1b")
    with torch.no_grad(), engine.evaluating(), pytest.raises(RuntimeError, match="ended after the block 'layers.0'"):
        engine.relay(lambda: model.layers[0](model.embed(make_batch()["ids"])))
    return str(raised.value)


def test_errors_of_reused_caches_and_incomplete_passes(ranks: Ranks) -> None:
    assert all("past_key_values" in message for message in ranks(relay_errors, 2, timeout=60))
