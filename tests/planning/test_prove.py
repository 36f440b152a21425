"""Ranks that are built at full size, on tensors without memory, and what is counted of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from omegaconf import DictConfig

from trainwright.command.cli import main
from trainwright.command.schema.compose import compose
from trainwright.planning.proof import prove as proving
from trainwright.planning.proof.prove import Proof, prove
from trainwright.planning.search.plan import Candidate
from trainwright.planning.search.search import plan

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
