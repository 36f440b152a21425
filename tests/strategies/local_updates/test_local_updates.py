"""Local SGD and DiLoCo match reference loops, with replicas of every kind."""

from typing import Any

import pytest

from tests.strategies.local_updates.cases import Outer, Seen, by_hand, difference, fit, mean_of

TIGHT = 2e-6
CLIP = 0.5  # of the norm of a replica's gradient, which is larger
DILOCO = {"sync_every": 2, "outer_lr": 0.7, "outer_momentum": 0.9}
STREAMING = {"sync_every": 4, "fragments": 2, "overlap_steps": 1, "mixing": 0.5}
REPLICAS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (2, {}),
    "zero1": (4, {"shard": 2, "stage": 1}),
    "zero3": (4, {"shard": 2, "stage": 3}),
    "pipeline": (4, {"pipeline": 2}),
    "tensor": (4, {"tensor": 2}),
    "context": (4, {"context": 2}),
    "experts": (4, {"expert": 2, "shard": 2}),
}


def follows(seen: list[Seen], history: list[Any]) -> bool:
    """Return whether every rank matches its replica in the reference after every step."""
    return all(
        difference(own, expected) < TIGHT
        for each in seen
        for own, expected in zip(each.own, history[each.replica], strict=True)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", list(REPLICAS))
def test_diloco_matches_the_paper(ranks: Any, kind: str) -> None:
    world, layout = REPLICAS[kind]
    network = "mixtral" if kind == "experts" else "gpt"
    more: dict[str, Any] = {"network": network, "accumulation": 3, "gradient_clip_val": CLIP}
    seen = ranks(fit, world, "diloco", {**DILOCO, **layout}, steps=5, validate_every=3, **more)
    history = by_hand(seen, Outer(2, 0.7, 0.9, True), network=network, clip=CLIP)
    assert follows(seen, history)
    assert difference(history[0][2], history[1][2]) > 1e-3, "replicas that never differ prove nothing"
    # Validation and final parameters are the mean, bit-identical on every rank.
    for each in seen:
        assert difference(each.final, mean_of([past[-1] for past in history])) < TIGHT
        assert difference(each.validated[0], mean_of([past[2] for past in history])) < TIGHT
        assert all((each.final[name] == seen[0].final[name]).all() for name in each.final)
        assert all((each.validated[0][name] == seen[0].validated[0][name]).all() for name in each.final)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["one rank", "zero3", "pipeline"])
def test_streaming_matches_the_paper(ranks: Any, kind: str) -> None:
    world, layout = REPLICAS[kind]
    seen = ranks(fit, world, "diloco", {**STREAMING, **layout}, steps=11)
    assert follows(seen, by_hand(seen, Outer(4, 0.7, 0.9, True, 2, 1, 0.5)))


def test_local_sgd_averages_parameters(ranks: Any) -> None:
    seen = ranks(fit, 3, "local_sgd", {"sync_every": 3}, steps=7)
    history = by_hand(seen, Outer(3))
    assert follows(seen, history)
    assert all((seen[0].own[5][n] == seen[1].own[5][n]).all() for n in seen[0].own[5])  # after the 6th step


def test_plain_outer_steps_are_local_sgd(ranks: Any) -> None:
    options = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "outer_nesterov": False}
    plain = ranks(fit, 2, "local_sgd", {"sync_every": 2}, optimizer="adamw", steps=5)
    outer = ranks(fit, 2, "diloco", options, optimizer="adamw", steps=5)
    for one, other in zip(plain, outer, strict=True):
        assert max(map(difference, one.own, other.own)) < 1e-6


def test_sync_every_1_is_ddp(ranks: Any) -> None:
    ddp = ranks(fit, 2, "ddp", {}, steps=4, accumulation=2)
    local = ranks(fit, 2, "local_sgd", {"sync_every": 1}, steps=4, accumulation=2)
    for one, other in zip(ddp, local, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=TIGHT)
        assert max(map(difference, one.own, other.own)) < TIGHT
    for step in range(4):
        means = mean_of([each.gradients[step] for each in local])
        assert difference(means, ddp[0].gradients[step]) < TIGHT


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["one rank", "zero1", "pipeline"])
def test_warmup_is_ddp(ranks: Any, kind: str) -> None:
    world, layout = REPLICAS[kind]
    options = {"sync_every": 2, "warmup_steps": 4, **layout}
    clip = {"gradient_clip_val": 0.3}
    ddp = ranks(fit, 2, "ddp", {}, optimizer="adamw", steps=4, **clip)
    local = ranks(fit, world, "diloco", options, optimizer="adamw", steps=6, **clip)
    for each in local:
        # AdamW amplifies the rounding of gradient sums.
        assert max(map(difference, each.own[:4], ddp[0].own)) < 1e-5
    assert difference(local[0].own[4], local[-1].own[4]) > 1e-4  # the first local step
