"""The group `compression` with parameter servers: what is pushed with it, and what is refused when it is composed."""

from pathlib import Path

from trainwright.command import run
from trainwright.command.schema.compose import compose, compose_checked
from trainwright.launch.worker import build_trainer
from trainwright.strategies.averaging.compression.codecs import Int8

WORDS = ("recipe=digits", "strategy=parameter_server", "devices=2", "accelerator=cpu", "logger=csv")


def problems(*words: str) -> list[str]:
    result = compose_checked([*WORDS, *words])
    assert result.cfg is not None
    return [*result.problems, *run.plan(result.cfg, "fit", None)[1]]


def test_the_group_says_how_gradients_are_pushed(tmp_path: Path) -> None:
    words = (*WORDS, "compression=int8", "compression.block=64", f"run_dir={tmp_path}")
    strategy = build_trainer(compose(None, words)).strategy
    codec = strategy._factory.codec
    assert isinstance(codec, Int8)
    assert codec.row_bytes(640) == Int8(block=64).row_bytes(640) != Int8().row_bytes(640)
    for name in ("fp16", "bf16", "topk", "onebit", "none"):
        assert problems(f"compression={name}") == []


def test_what_cannot_be_pushed_is_refused() -> None:
    [problem] = problems("compression=powersgd")
    assert "compression=powersgd with parameter servers" in problem
    assert "fp16, bf16, int8, topk, onebit, or none; type compression=int8" in problem


def test_ranks_of_their_own_do_not_count_as_ranks_that_train() -> None:
    own = "strategy.server_ranks=own"
    [problem] = problems(own, "strategy.servers=2")
    assert "strategy.servers=2 with strategy.server_ranks=own on 2 rank(s): no rank is left to train" in problem
    assert "type devices=3 or more, or strategy.server_ranks=beside" in problem
    words = ("devices=4", "micro_batch_size=16", "global_batch_size=64", "inject=[kill(rank=3,at_step=1)]")
    batch, fault = problems(own, *words)
    assert "3 data rank" in batch
    assert "rank 3 only serves (strategy.server_ranks=own)" in fault
    assert "type one below 3" in fault


def test_it_is_said_once() -> None:
    [problem] = problems("compression=int8", "strategy.compression=topk")
    assert "compression=int8 with strategy.compression=topk" in problem
    [problem] = problems("compression=topk", "compression.ratio=2.0")
    assert "compression.ratio=2.0" in problem


def test_norms_of_gradients_that_no_worker_sees_are_refused() -> None:
    assert any("monitor.norms" in each and "monitor=default" in each for each in problems("monitor=norms"))
