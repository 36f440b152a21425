"""``trainwright generate``: text from a run directory."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command.project import environment
from tests.recipes.conftest import write_text
from tests.warm import warm_run
from trainwright.command.cli import main
from trainwright.tools.generate.command import _prompts

TINY = (
    "recipe=hf_causal_lm", "model=llama", "module.config.num_hidden_layers=2", "module.config.hidden_size=32",
    "module.config.intermediate_size=64", "module.config.num_attention_heads=4", "module.seq_len=16", "max_steps=2",
    "module.config.num_key_value_heads=2", "monitor=none", "logger=csv", "report=false", "run_dir=first",
)  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a run directory with only a configuration."""
    monkeypatch.chdir(tmp_path)
    folder = Path("empty")
    folder.mkdir()
    (folder / "config.yaml").write_text(
        "name: empty\nmodule: {_target_: a.B}\ndata: {}\nckpt_path: null\nresume: null\ninit_from: null\n"
        "trust: false\nstrict: true\nresume_folders: []\ncheckpoint: {}\nstrategy:\n"
        "  _target_: trainwright.strategies.data.single.SingleDeviceStrategy\n"
    )
    return folder


@pytest.mark.thorough
def test_one_and_two_processes_generate_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("jumps over\n\nlazy\n")

    def typed(*words: str) -> Any:
        done = warm_run(
            [sys.executable, "-m", "trainwright", *words], capture_output=True, env=environment(), timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    typed("fit", *TINY, f"data.path={text}", "data.batch_size=4", "global_batch_size=null")
    words = ("generate", "first", "prompt=the quick", "prompts_file=prompts.txt", "max_new_tokens=6", "temperature=1.5")
    alone, split = (json.loads(typed(*words, "--json", *more)) for more in ((), ("strategy=pipeline", "devices=2")))
    assert [each["prompt"] for each in alone["texts"]] == ["the quick", "jumps over", "lazy"]
    assert alone["texts"] == split["texts"]
    assert alone["new_tokens"] == sum(each["new_tokens"] for each in alone["texts"]) == 18
    assert alone["tokens_per_second"] == pytest.approx(18 / alone["seconds"])
    shown = typed(*words[:3], "max_new_tokens=3", "strategy=zero3", "devices=2")  # one rank has no prompt
    assert shown.startswith("the quick")
    assert "3 new tokens in" in shown


def test_prompts() -> None:
    words = ["prompt=a, b = c", 'prompt=["d","e, f"]', "prompt=[g", "prompt=[1]"]
    assert _prompts(words) == ["a, b = c", "d", "e, f", "[g", "[1]"]


@pytest.mark.parametrize(("words", "parts"), [
    (["prompt=a"], ["no run directory was given", "generate RUN prompt=TEXT"]),
    (["nowhere", "prompt=a"], ["nowhere: not a run directory"]),
    (["empty", "prompts_file=none.txt"], ["prompts_file=none.txt", "No such file"]),
    (["empty", "prompt=a", "strategy=tensr"], ["did you mean tensor?"]),
    (["empty", "promt=a", "temprature=1"], ["did you mean prompt?", "did you mean temperature?"]),
    (["empty", "prompt=a"], ["there is no checkpoint in empty/checkpoints"]),
    (["empty", "ckpt_path=empty", "prompt=", "max_new_tokens=0", "top_p=2", "batch_size=a"],
     ["prompt=['']", "max_new_tokens=0", "top_p=2", "batch_size=a"]),
    (["empty", "ckpt_path=empty", "prompt=a", "top_p=0.5"], ["top_p=0.5 with temperature=0"]),
])  # fmt: skip
def test_refused(run_dir: Path, words: list[str], parts: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    for part in parts:
        assert part in err
    assert not Path("runs").exists()
