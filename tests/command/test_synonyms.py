"""Words of other libraries, typed on the command line, are answered with what to type."""

import re

import pytest

from trainwright.command.schema.compose import compose, compose_checked
from trainwright.command.verbs import run_command
from trainwright.core.problems import ConfigError

# Typed -> what the answer says to type.
WORDS = {
    "strategy=fsdp": "strategy=zero3",
    "strategy=FSDP2": "strategy=zero3",
    "strategy=fsdp1": "strategy=zero3",
    "strategy=full_shard": "strategy=zero3",
    "strategy=deepspeed_stage_1": "strategy=zero1",
    "strategy=deepspeed_stage_2_offload": "strategy=zero2",
    "strategy=deepspeed_stage_3": "strategy=zero3",
    "strategy=tp": "strategy=tensor",
    "strategy=tensor_parallel": "strategy=tensor",
    "strategy=pp": "strategy=pipeline",
    "strategy=pipeline-parallel": "strategy=pipeline",
    "strategy=cp": "strategy=context",
    "strategy=sequence_parallel": "strategy=context",
    "strategy=ep": "strategy=expert",
    "strategy=ps": "strategy=parameter_server",
    "strategy=hsdp": "strategy=zero3",
    "strategy=dp": "strategy=ddp",
    "precision=fp16": "precision=16-mixed",
    "precision=16": "precision=16-mixed",
    "precision=half": "precision=16-mixed",
    "precision=float16": "precision=16-mixed",
    "precision=bf16": "precision=bf16-mixed",
    "precision=bfloat16": "precision=bf16-mixed",
    "precision=fp32": "precision=32",
    "precision=32-true": "precision=32",
    "trainer.max_epochs=3": "max_epochs=3",
    "trainer.max_steps=3": "max_steps=3",
    "trainer.devices=2": "devices=2",
    "trainer.accelerator=cpu": "accelerator=cpu",
    "trainer.strategy=fsdp": "strategy=zero3",
    "trainer.precision=16": "precision=16-mixed",
    "trainer.logger=csv": "logger=csv",
    "trainer.num_nodes=1": "nodes=1",
    "trainer.accumulate_grad_batches=4": "accumulation.steps=4",
    "trainer.default_root_dir=x": "run_dir=x",
    "+trainer.max_epochs=3": "max_epochs=3",
    "trainer.gradient_clipping=1.0": "trainer.gradient_clip_val=1.0",
    "gradient_clip_val=1.0": "trainer.gradient_clip_val=1.0",
    "max_grad_norm=1.0": "trainer.gradient_clip_val=1.0",
    "detect_anomaly=true": "trainer.detect_anomaly=true",
    "lr=0.1": "optimizer.lr=0.1",
    "learning_rate=0.1": "optimizer.lr=0.1",
    "model.lr=0.1": "optimizer.lr=0.1",
    "optimizer.learning_rate=0.1": "optimizer.lr=0.1",
    "epochs=3": "max_epochs=3",
    "num_epochs=3": "max_epochs=3",
    "steps=3": "max_steps=3",
    "gpus=2": "devices=2",
    "num_gpus=2": "devices=2",
    "num_nodes=1": "nodes=1",
    "fp16=true": "precision=16-mixed",
    "bf16=true": "precision=bf16-mixed",
    "fsdp=true": "strategy=zero3",
    "random_seed=3": "seed=3",
    "gradient_accumulation_steps=4": "accumulation.steps=4",
    "output_dir=x": "run_dir=x",
    "hydra.run.dir=x": "run_dir=x",
    "hydra.sweep.dir=x": "run_dir=x",
}
# Typed -> what the answer contains, where the user has to decide.
DECISIONS = {
    "strategy=deepspeed": ["strategy=zero1", "strategy=zero2", "strategy=zero3", "strategy=deepspeed_json"],
    "strategy=model_parallel": ["strategy=hybrid", "strategy=tensor", "strategy=pipeline"],
    "precision=amp": ["precision=16-mixed", "precision=bf16-mixed"],
    "batch_size=3": ["micro_batch_size=3", "global_batch_size=3"],
    "strategy.tp=2": ["strategy=hybrid or tensor", "strategy.tensor=2"],
    "trainer.enable_checkpointing=false": ["checkpoint=...", "last, none"],
    "trainer.enable_progress_bar=false": ["monitor=...", "none"],
    "hydra/launcher=joblib": ["launch=...", "ray, resilient, slurm"],
    "hydra/sweeper=optuna": ["-m seed=0,1"],
    "experiment=mine": ["recipe=...", "digits", "gpt"],
}


@pytest.mark.sample(12)
@pytest.mark.parametrize(("typed", "answer"), WORDS.items())
def test_word_is_answered_with_what_to_type(typed: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("digits", [typed])
    [problem] = caught.value.problems
    assert problem.startswith(typed.partition("=")[0])
    assert re.search(rf"type {re.escape(answer)}(;|$)", problem), problem
    assert "\n" not in problem
    assert compose_checked(["recipe=digits", answer]).problems == []


@pytest.mark.sample(4)
@pytest.mark.parametrize(("typed", "parts"), DECISIONS.items())
def test_word_with_several_meanings(typed: str, parts: list[str]) -> None:
    [problem] = compose_checked(["recipe=digits", typed]).problems
    assert [part for part in parts if part not in problem] == []
    assert "\n" not in problem


@pytest.mark.parametrize(("words", "answer"), [
    (["--lr", "0.1", "recipe=digits"], "type optimizer.lr=0.1"),
    (["recipe=digits", "--gpus=1"], "type devices=1"),
    (["recipe=digits", "--fp16", "max_steps=2"], "type precision=16-mixed"),
    (["--recipe", "digits", "max_steps=2"], "type recipe=digits"),
])  # fmt: skip
def test_keys_typed_like_options(words: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["fit", *words, "--print-config"]) == 2
    said = capsys.readouterr().err
    assert answer in said
    assert "because:" in said, "several problems"


def test_answer_names_keys_that_the_recipe_reads(conf) -> None:  # type: ignore[no-untyped-def]
    """The user's recipe builds its optimizer itself, so that optimizer.lr would have no effect."""
    [problem] = compose_checked(["recipe=mine", "lr=0.1"], conf).problems
    assert "optimizer.lr" not in problem


@pytest.mark.parametrize(("word", "verb"), [("train", "fit"), ("eval", "test"), ("infer", "predict")])
def test_verbs_of_other_libraries(capsys: pytest.CaptureFixture[str], word: str, verb: str) -> None:
    assert run_command([word, "recipe=digits"]) == 2
    assert f"{word}: there is no such verb; did you mean {verb}?" in "".join(capsys.readouterr())
