"""Shell completion: what is offered, and through a real shell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.command.completion import candidates

# Types a line into bash as TAB does; prints what it offers.
SHELL = """
eval "$(register-python-argcomplete trainwright)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9 COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
read -r -a COMP_WORDS <<< "$1"
function=$(complete -p trainwright | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function trainwright 2> /dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(("words", "begun", "some"), [
    ([], "", {"fit", "verify", "checkpoint"}),
    (["-m"], "", {"fit", "verify"}),
    (["fit"], "", {"recipe=", "strategy=", "devices=", "max_steps="}),
    (["fit", "recipe=gpt"], "strategy=ze", {"strategy=zero1", "strategy=zero3", "strategy=ddp"}),
    (["plan", "recipe=gpt", "strategy=pipeline"], "strategy.sch", {"strategy.schedule=", "strategy.pipeline="}),
    (["fit", "recipe=digits"], "module.", {"module._target_=", "data.batch_size="}),
    (["fit", "--config-dir", "FOLDER"], "recipe=", {"recipe=mine", "recipe=digits"}),
])  # fmt: skip
def test_candidates(tmp_path: Path, words: list[str], begun: str, some: set[str]) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").touch()
    found = list(candidates([str(tmp_path) if word == "FOLDER" else word for word in words], begun))
    assert some <= set(found)


def test_other_verbs_complete_files() -> None:
    assert list(candidates(["report"], "runs/")) == []


@pytest.mark.parametrize(("line", "offered"), [
    ("trainwright fit recipe=gpt strategy=ze", ["zero1", "zero2", "zero3"]),
    ("trainwright verify --rep", ["--report "]),
])  # fmt: skip
def test_bash(line: str, offered: list[str]) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["bash", "-c", SHELL, "bash", line]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == offered, done.stderr
