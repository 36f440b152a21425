"""Invalid commands end with status 2, one paragraph and nothing on disk."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.command.project import environment, write_project
from tests.faults.junk import BASES, VALUES, build_accepted, keys_of, override, problems_of
from tests.warm import warm_run
from trainwright.command.cli import main
from trainwright.core.processes import machine

# TRAINWRIGHT_JUNK_DRAWS=20000 draws so many by hand, other ones each time.
DRAWS = int(os.environ.get("TRAINWRIGHT_JUNK_DRAWS", "120"))
# Composing a whole command takes most of a draw's time, and no value takes another way through it than its kind.
_WHOLE = 12


@st.composite
def commands(draw: st.DrawFn) -> tuple[tuple[str, ...], dict[str, Any], str, bool]:
    base = draw(st.sampled_from(BASES))
    keys = draw(st.lists(st.sampled_from(keys_of(base)), min_size=1, max_size=2, unique=True))
    verb = draw(st.sampled_from(("fit", "fit", "validate")))
    return base, {key: draw(st.sampled_from(VALUES)) for key in keys}, verb, draw(st.integers(1, _WHOLE)) == _WHOLE


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    return tmp_path


@pytest.mark.thorough
@pytest.mark.timeout(max(300, DRAWS))
@settings(
    max_examples=DRAWS, deadline=None, derandomize=DRAWS == 120, database=None, suppress_health_check=list(HealthCheck)
)
@given(command=commands())
def test_junk_is_accepted_or_refused_in_a_paragraph(
    empty: Path, command: tuple[tuple[str, ...], dict[str, Any], str, bool]
) -> None:
    """120 attempts: one or two keys of the schema with junk, accepted, or refused by the checks or by building."""
    base, drawn, verb, whole = command
    problems = problems_of(base, drawn, verb, whole=whole) or build_accepted(drawn)
    for problem in problems:
        assert problem.strip()
        assert "Traceback" not in problem
        assert "\n\n" not in problem
    assert [path.name for path in empty.iterdir()] == ["here"]
    assert list((empty / "here").iterdir()) == []


# What was typed -> part of the paragraph.
REFUSED: dict[tuple[str, ...], str] = {
    ("devices=1000000000",): "at most 4096",
    ("devices=1000000000", "strategy=zero3"): "at most 4096",
    ("devices=1000000000", "strategy=auto"): "at most 4096",
    ("nodes=1000000000",): "at most 65536",
    ("optimizer.lr=-1",): "finite number of at least 0",
    ("optimizer.lr=nan",): "finite number of at least 0",
    ("optimizer.lr=inf",): "finite number of at least 0",
    ("optimizer.lr=abc",): "finite number of at least 0",
    ("name=${nope}",): "name: the reference cannot be resolved",
    ("name=${oc.env:NOPE}",): "NOPE",
    ("name=${name}",): "Recursive interpolation",
    ("name=..",): "the name of a directory",
    ("data.batch_size=${nope}",): "data.batch_size: the reference cannot be resolved",
    ("~strategy",): "every run needs a choice of strategy",
    ("~optimizer",): "every run needs a choice of optimizer",
    ("run_dir=",): "run_dir=: is empty",
    ("init_from=",): "init_from=: is neither",
    ("launch.grace_seconds=nan",): "at most",
    ("launch.grace_seconds=1e300",): "at most",
    ("seed=-1",): "at least 0",
    ("seed=99999999999",): "at most",
    ("ckpt_path=http://127.0.0.1:9/a.ckpt",): "cannot connect to 127.0.0.1:9",
    ("ckpt_path=http://name.invalid/a.ckpt",): "name.invalid",
}


@pytest.mark.sample(5)
@pytest.mark.parametrize(("words", "part"), REFUSED.items(), ids=str)
def test_refused_before_a_rank_starts(
    words: tuple[str, ...], part: str, empty: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """23 attempts."""
    assert main(["fit", "recipe=digits", *words]) == 2
    _check(*capfd.readouterr(), part)
    assert list((empty / "here").iterdir()) == []


@pytest.mark.parametrize("included", ["mine", "/recipe@_here_: mine"])
def test_a_recipe_that_includes_itself(included: str, empty: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """2 attempts."""
    recipes = empty / "conf" / "recipe"
    recipes.mkdir(parents=True)
    (recipes / "mine.yaml").write_text(f"# @package _global_\ndefaults:\n  - {included}\nname: mine\n")
    assert main(["fit", "recipe=mine", "--config-dir", str(empty / "conf")]) == 2
    _check(*capfd.readouterr(), "cannot be composed")
    assert list((empty / "here").iterdir()) == []


def _check(out: str, err: str, part: str) -> None:
    assert out == ""
    assert err.startswith("trainwright: nothing was started, because")
    assert part in err
    assert "Traceback" not in err
    assert "\n\n" not in err
    assert err.count("\n") < 12


# What a rank refuses, before the run trains: words -> part of the paragraph.
BY_A_RANK: dict[tuple[str, ...], str] = {
    (
        "checkpoint.last.every_n_steps=0",
        "checkpoint.last.keep_last=0",
        "checkpoint.last.filename=../../x",
    ): "filename='../../x' (allowed",
    ("module._target_=os.getcwd",): "os.getcwd",
    ("module._target_=builtins.dict",): "module._target_=builtins.dict: is a dict",
    ("module.hidden=abc",): "module: my_module.MyModule cannot be built",
    ("ckpt_path=../other.ckpt",): "../other.ckpt holds a state that does not fit this run",
    ("ckpt_path=../other.ckpt", "strict=false"): "no tensor matches",
    ("init_from=../other.safetensors", "strict=false"): "No tensor fits",
    ("run_dir=../begun", "ckpt_path=last", "max_steps=1"): "max_steps=1, but the checkpoint",
    (
        "devices=2",
        "strategy=zero2",
        "checkpoint.last.keep_last=0",
        "launch.max_restarts=3",
    ): "keep_last=0: must be a whole number",
}
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from trainwright.command.cli import main

def held(folder):
    return sorted((str(path), path.stat().st_size) for path in folder.rglob("*"))

usual = json.loads(sys.argv[1])
assert main(["fit", *usual, "max_steps=2", "run_dir=../begun"]) == 0
weights = {"foo.part": torch.zeros(3, 5)}
save_file(weights, "../other.safetensors")
torch.save({"state_dict": weights, "epoch": 0, "global_step": 5, "optimizer_states": [], "lr_schedulers": [],
            "loops": {}, "pytorch-lightning_version": "2.6.0"}, "../other.ckpt")
before = held(Path(".."))
for words in json.loads(sys.argv[2]):
    print("TYPED", flush=True, file=sys.stderr)
    code = main(["fit", *usual, *words])
    print("CODE", code, "AS BEFORE", held(Path("..")) == before, flush=True, file=sys.stderr)
"""


@pytest.mark.thorough
def test_refused_by_a_rank_before_training(empty: Path) -> None:
    """9 attempts, in one process: starting one costs seconds. What was there before is as it was."""
    path = f"{os.environ.get('PYTHONPATH', '')}:{empty}"
    conf = write_project(empty)
    usual = ["--config-dir", str(conf), "recipe=mine", "logger=csv", "monitor=none"]
    done = warm_run(
        [sys.executable, "-c", SCRIPT, json.dumps(usual), json.dumps([list(words) for words in BY_A_RANK])],
        capture_output=True,
        env={**environment(), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    for said, (words, part) in zip(done.stderr.split("TYPED\n")[1:], BY_A_RANK.items(), strict=True):
        paragraph, _, end = said.partition("CODE ")
        assert end.strip() == "2 AS BEFORE True", (words, said)
        assert part in paragraph, (words, said)
        assert "Traceback" not in paragraph, (words, said)
        assert "\n\n" not in paragraph, (words, said)


def test_every_value_can_be_typed() -> None:
    """The words of a draw are what Hydra reads as the value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for value in VALUES:
        if isinstance(value, str) and "${" not in value:
            assert parser.parse_override(override("name", value)).value() == value, value
