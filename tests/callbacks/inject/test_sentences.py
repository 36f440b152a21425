"""Fault sentences: parsing, errors, and their place in the configuration."""

from pathlib import Path

import pytest

from tests.command.project import run_command
from trainwright.callbacks import inject
from trainwright.callbacks.inject.sentences import SentenceError, make_faults, parse, split_inject
from trainwright.command import run
from trainwright.command.schema.compose import compose, compose_checked
from trainwright.command.sweep import expand
from trainwright.core.problems import ConfigError


@pytest.mark.parametrize(("text", "said"), [
    ("kill(rank=1, at_step=7)", ["kill(rank=1, at_step=7)"]),
    ("kill(1, 7)", ["kill(rank=1, at_step=7)"]),
    ("inject.kill(rank=1, at_step=7, signal=11)", ["kill(rank=1, at_step=7, signal=11)"]),
    ("kill(rank=null, at_step=7, times=None)", ["kill(rank=None, at_step=7, times=None)"]),
    ("[kill(rank=1, at_step=7), slow(rank=0, factor=2)]", ["kill(rank=1, at_step=7)", "slow(rank=0, factor=2)"]),
    ("'kill(rank=1, at_step=7)'", ["kill(rank=1, at_step=7)"]),
    ("['stop(0, 1)', exit(1, 2, 3)]", ["stop(rank=0, at_step=1)", "exit(rank=1, at_step=2, code=3)"]),
    ("partition([1, 2], 4)", ["partition(ranks=[1, 2], at_step=4)"]),
    (
        "raise_in('on_train_batch_end', at_step=3, error=ValueError('why', 2))",
        ["raise_in(hook='on_train_batch_end', at_step=3, error=ValueError('why', 2))"],
    ),
    ("soak(seed=1, every_seconds=(2, 3), kinds=['kill'])", ["soak(seed=1, every_seconds=(2, 3), kinds=['kill'])"]),
    ("null", []),
    ("[]", []),
])  # fmt: skip
def test_sentences(text: str, said: list[str]) -> None:
    found = parse(text)
    assert [str(sentence) for sentence in found] == said
    # The form written to config.yaml parses to the same sentence.
    for sentence in found:
        [again] = parse(str(sentence))
        assert str(again) == str(sentence)
    assert [fault.sentence for fault in make_faults([text])] == said


@pytest.mark.parametrize(("text", "parts"), [
    ("kil(rank=1, at_step=7)", ["no fault 'kil'", "did you mean kill?", "corrupt_checkpoint"]),
    ("kill(rank=1)", ["missing a required argument: 'at_step'", "kill(rank, at_step, signal=9, times=1)"]),
    ("kill(1, 2, tims=3)", ["takes no tims", "did you mean times?"]),
    ("kill(1, 2, 3)", ["too many positional arguments", "kill(rank, at_step"]),
    ("kill(**{'rank': 1})", ["takes no **"]),
    ("kill(rank=-1, at_step=7)", ["rank=-1", "a global rank"]),
    ("kill(rank=True, at_step=1.5)", ["rank=True", "at_step=1.5"]),
    ("kill(rank=one, at_step=2)", ["one is no value"]),
    ("kill(rank=1, at_step=7", ["this is no sentence", "+inject='kill(rank=1, at_step=7)'"]),
    ("hang(0, 1, how='wait')", ["how='wait'", "allowed: sleep, lock, gil, skip_collective, data"]),
    ("slow(rank=0, factor=1)", ["factor=1", "must be a finite number above 1"]),
    ("slow(rank=0, factor=2, from_step=5, to_step=5)", ["to_step above from_step"]),
    ("nan(0, 1, parameter='w')", ["where='gradient'"]),
    ("raise_in('on_train_bach_end')", ["hook='on_train_bach_end'", "did you mean on_train_batch_end?"]),
    ("raise_in('setup', error=__import__('os'))", ["__import__('os') is no built-in exception"]),
    ("raise_in('setup', error=SystemExit(1))", ["is no built-in exception"]),
    ("raise_in('setup', error=UnicodeDecodeError())", ["UnicodeDecodeError()"]),
    ("raise_in('setup', error=ExceptionGroup('why', []))", ["ExceptionGroup('why', [])", "non-empty"]),
    ("__import__('os').system('touch ran')", ["there is no fault"]),
    ("[kill(rank=[x for x in (1,)][0], at_step=1)]", ["is no value"]),
    ("kill", ["kill is no sentence"]),
    ("7", ["7 is no sentence"]),
    ("soak(seed=1, kinds=['hang'])", ["kinds=['hang']", "'partition'"]),
    ("soak(seed=1, kinds=[['kill']])", ["kinds=[['kill']]"]),
    ("soak(seed=1, every_seconds=(3, 2))", ["every_seconds=(3, 2)"]),
    ("(" * 400 + ")" * 400, ["this is no sentence"]),
])  # fmt: skip
def test_what_is_refused(text: str, parts: list[str]) -> None:
    with pytest.raises(SentenceError) as error:
        parse(text)
    for part in parts:
        assert part in str(error.value)
    assert not Path("ran").exists()


def test_invalid_arguments_in_python() -> None:
    with pytest.raises(ValueError, match="kill: rank=-1.*kill: at_step=0.5"):
        inject.kill(rank=-1, at_step=0.5)  # type: ignore[arg-type]


def test_split_inject() -> None:
    taken = split_inject(["a=1", "+inject=kill(1, 2)", "injection=3", "++inject=[stop(0, 1)]", "+inject=oops"])
    assert taken.rest == ["a=1", "injection=3"]
    assert taken.sentences == ["kill(rank=1, at_step=2)", "stop(rank=0, at_step=1)"]
    assert not taken.replaces
    [problem] = taken.problems
    assert problem.startswith("+inject=oops: oops is no sentence")


def test_sentences_in_configuration(conf: Path) -> None:
    (conf / "recipe" / "faulty.yaml").write_text(
        "# @package _global_\ndefaults: [mine]\nname: faulty\ninject: ['exit(rank=0, at_step=1)']\n"
    )

    def injected(*words: str) -> list[str]:
        return list(compose("faulty", words, config_dir=conf).inject)

    assert injected() == ["exit(rank=0, at_step=1)"]
    assert injected("+inject=kill(0, 2)") == ["exit(rank=0, at_step=1)", "kill(rank=0, at_step=2)"]
    assert injected("inject=kill(0, 2)") == ["kill(rank=0, at_step=2)"]
    assert injected("inject=null") == []
    assert list(compose("mine", config_dir=conf).inject) == []


def _problems(conf: Path, *words: str, verb: str = "fit") -> str:
    result = compose_checked(["recipe=mine", "strategy=ddp", "devices=2", "accelerator=cpu", *words], conf)
    assert result.cfg is not None
    return "\n".join([*result.problems, *run.plan(result.cfg, verb)[1]])


@pytest.mark.sample(5)
@pytest.mark.parametrize(("words", "verb", "parts"), [
    (["+inject=kill(rank=2, at_step=1)"], "fit", ["2 rank(s), so there is no rank 2", "devices=3"]),
    (["+inject=partition([1, 5], 1)"], "fit", ["no rank 5"]),
    (["+inject=partition(0, 1)", "devices=1", "strategy=single"], "fit", ["devices=2"]),
    (["+inject=soak(1, kinds=['partition'])", "devices=1", "strategy=single"], "fit", ["devices=2"]),
    (["+inject=kill(rank=1, at_step=4)"], "fit", ["max_steps=4", "the last step is 3"]),
    (["+inject=full_disk(at_step=1)", "checkpoint=none"], "fit", ["no checkpoint", "checkpoint=last"]),
    (["+inject=kill(rank=1, at_step=1)"], "test", ["inject with test"]),
    (["+inject=foo(1)"], "fit", ["no fault 'foo'"]),
    (["inject.x=1"], "fit", ["inject.x=1"]),
])  # fmt: skip
def test_mismatch_with_run_is_found_before_start(conf, words, verb, parts):
    found = _problems(conf, *words, verb=verb)
    for part in parts:
        assert part in found


def test_valid_sentences(conf: Path) -> None:
    words = ["+inject=[kill(1, 3), partition(1, 2), slow(rank=None, factor=1.5), corrupt_checkpoint(step=4)]"]
    assert _problems(conf, *words) == ""
    with pytest.raises(ConfigError, match="no fault"):
        compose("mine", ["+inject=foo(1)"], config_dir=conf)


def test_sweep_jobs_have_the_faults(conf: Path) -> None:
    jobs = expand(["recipe=mine", "seed=1,2", "+inject=[kill(1, 2), stop(0, 1)]"], conf)
    assert [job.overrides[-1] for job in jobs] == ["+inject=[kill(1, 2), stop(0, 1)]"] * 2
    assert [job.varied for job in jobs] == [("seed=1",), ("seed=2",)]


def test_fault_from_command_line(conf: Path, tmp_path: Path) -> None:
    words = ["recipe=mine", "strategy=ddp", "devices=2", "accelerator=cpu", "monitor=none", "logger=csv", "run_dir=run"]
    done = run_command("fit", "--config-dir", str(conf), *words, "+inject=exit(rank=1, at_step=2, code=7)")
    assert done.returncode == 7  # the exit code of the faulty rank
    assert "rank 1 of 2" in done.stdout
    assert "injected on rank 1 at step 2: exit(rank=1, at_step=2, code=7)" in Path("run/logs/rank_1.log").read_text()
    assert [path.name for path in Path("run/faults").iterdir()] == ["rank_1.json"]
