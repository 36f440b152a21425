"""Ranks that are built at full size, on tensors without memory, and what is counted of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from omegaconf import DictConfig

from trainwright.trainer.cli import main
from trainwright.trainer.compose import compose
from trainwright.trainer.planning import prove as proving
from trainwright.trainer.planning.in_flight import in_flight
from trainwright.trainer.planning.live import LiveCounter
from trainwright.trainer.planning.order import BACKWARD, FORWARD, actions_of, until_fullest
from trainwright.trainer.planning.plan import Candidate
from trainwright.trainer.planning.prove import Proof, prove
from trainwright.trainer.planning.search import plan

DENSE = ("recipe=llama_3d", "devices=4", "device=cpu", "accelerator=cpu", "global_batch_size=16")
EXPERTS = ("recipe=moe", "devices=4", "device=cpu", "accelerator=cpu", "precision=bf16-mixed", "module.meta=true")


@cache
def planned(*words: str) -> tuple[DictConfig, tuple[Candidate, ...]]:
    cfg = compose(None, words)
    return cfg, plan(cfg).ranked


def is_split_pipeline(each: Candidate) -> bool:
    return each.layout.pipeline == 2 and each.layout.shard == 2 and each.work.stage == 3


CASES: dict[str, tuple[tuple[str, ...], Callable[[Candidate], bool]]] = {
    "zero2": (DENSE, lambda each: each.strategy == "zero2"),
    "zero3": (DENSE, lambda each: each.strategy == "zero3"),
    "pipeline x tensor": (DENSE, lambda each: each.layout.pipeline == 2 and each.layout.tensor == 2),
    "pipeline x shard, stage 3": (DENSE, is_split_pipeline),
    "expert x shard": (EXPERTS, lambda each: each.layout.expert == 2 and each.layout.pipeline == 1),
    "pipeline x expert": (EXPERTS, lambda each: each.layout.expert > 1 and each.layout.pipeline == 2),
}


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_built_holds_what_was_predicted(name: str) -> None:
    words, is_it = CASES[name]
    cfg, ranked = planned(*words)
    chosen = next(each for each in ranked if is_it(each))
    proofs = prove(cfg, chosen)
    layout = chosen.layout
    places = [layout.coordinates(each.rank)["pipeline"] for each in proofs]
    assert places == ([0, layout.pipeline - 1] if layout.pipeline > 1 else [0])
    for each in proofs:
        assert each.parameters == pytest.approx(each.predicted_parameters, rel=0.01)
        assert each.holds, each.text()
    assert not torch.distributed.is_initialized()


def test_an_accumulated_gradient_counts() -> None:
    cfg, ranked = planned(*DENSE)
    zero1 = next(each for each in ranked if each.strategy == "zero1")
    once, more = (prove(cfg, replace(zero1, work=replace(zero1.work, micro_batch=1, rounds=n)))[0] for n in (1, 2))
    assert more.counted > once.counted
    assert once.holds, once.text()
    assert more.holds, more.text()


def test_what_cannot_be_proved_says_so() -> None:
    cfg, ranked = planned(*DENSE)
    zero3 = next(each for each in ranked if each.strategy == "zero3")
    with pytest.raises(ValueError, match=r"strategy\.offload=optimizer, and bytes .*; leave out --prove"):
        prove(cfg, replace(zero3, work=replace(zero3.work, offload="optimizer")))
    cut = next(each for each in ranked if each.layout.pipeline == 2)
    with pytest.raises(ValueError, match=r"schedule=interleaved_zero_bubble .*allowed are .* such as 1f1b"):
        prove(cfg, replace(cut, work=replace(cut.work, schedule="interleaved_zero_bubble", stages_per_rank=2)))
    cfg, ranked = planned("recipe=moe", "accelerator=cpu", "device=cpu")  # reads how many tokens each expert has
    with pytest.raises(ValueError, match="training_step of MoEModule reads values of tensors.*leave out --prove"):
        prove(cfg, ranked[0])


@pytest.mark.parametrize("counted", [100.0, 110.0])
def test_the_command_fails_where_bytes_differ(
    counted: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = Proof(0, 1, counted, 100.0, 10.0, 10.0, "loss", 1.0)
    monkeypatch.setattr(proving, "prove", lambda cfg, candidate: (proof,))
    words = ["plan", "recipe=gpt", "accelerator=cpu", "device=cpu", "devices=1", "--prove"]
    assert main(words) == (0 if counted == 100.0 else 1)
    assert proof.text() in capsys.readouterr().out
    assert ("as predicted" in proof.text()) == (counted == 100.0)


# ---------------------------------------------------------------------------------------------------------------------
# The order of a pipeline's passes


ORDERS = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("looped_bfs", 2)]


@pytest.mark.parametrize(("schedule", "stages"), ORDERS)
@pytest.mark.parametrize(("ranks", "parts"), [(2, 6), (4, 4), (4, 8)])
def test_actions_are_those_of_the_schedule_as_far_as_it_gets_fuller(
    schedule: str, stages: int, ranks: int, parts: int
) -> None:
    for rank in range(ranks):
        actions = actions_of(schedule, ranks, stages, parts, rank)
        for kind in (FORWARD, BACKWARD):
            passes = {(each.stage, each.part) for each in actions if each.kind == kind}
            assert passes == {(rank + ranks * n, part) for n in range(stages) for part in range(parts)}
        assert len(actions) == 2 * stages * parts
        first = until_fullest(actions)
        assert first == actions[: len(first)]
        assert most_live(first) == most_live(actions) == in_flight(schedule, ranks, stages, parts, rank)
        graded = [len({each.stage for each in some[:-1] if each.kind == BACKWARD}) for some in (first, actions)]
        assert graded[0] == graded[1]


def most_live(actions: object) -> int:
    live = most = 0
    for each in actions:  # type: ignore[attr-defined]
        live += 1 if each.kind == FORWARD else -1
        most = max(most, live)
    return most


def test_only_what_makes_it_fuller_is_run() -> None:
    few = until_fullest(actions_of("1f1b", 4, 1, 1000, 1))
    assert [each.kind for each in few] == [FORWARD] * 3 + [BACKWARD, FORWARD, BACKWARD]


# ---------------------------------------------------------------------------------------------------------------------
# Counting


def test_storages_count_while_they_are_there_as_large_as_they_are() -> None:
    counter = LiveCounter()
    with counter:
        kept = torch.ones(100)
        torch.ones(1000)
        assert (counter.now, counter.peak) == (400, 4400)
        view = kept[:50]
        assert counter.now == 400
        kept.untyped_storage().resize_(0)
        assert counter.now == 0
        counter.reset_peak()
        kept.untyped_storage().resize_(800)
        assert (counter.now, counter.peak) == (800, 800)
        del kept
        assert counter.now == 800, "a view holds it"
        del view
        assert counter.now == 0
    torch.ones(10).untyped_storage().resize_(0)
    assert counter.now == 0
