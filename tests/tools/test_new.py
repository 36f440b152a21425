"""`trainwright new` creates a project that trains, on one process and sharded, and refuses what it cannot create."""

import csv
from pathlib import Path

import pytest

from tests.command.project import run_command


def test_a_new_project_trains_on_two_layouts(tmp_path):
    assert _output("new", "my_project", cwd=tmp_path).startswith("created my_project/")
    folder = tmp_path / "my_project"
    words = ("fit", "--config-dir", "conf", "recipe=my_project", "max_steps=4", "accelerator=cpu")
    for layout in (("run_dir=one",), ("run_dir=two", "strategy=zero3", "devices=2")):
        _output(*words, *layout, cwd=folder)
    losses = [_losses(folder / run / "metrics.csv") for run in ("one", "two")]
    assert losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    compile((folder / "tests" / "test_layouts.py").read_text(), "test_layouts.py", "exec")


def _output(*words: str, cwd: Path) -> str:
    done = run_command(*words, cwd=cwd)
    assert done.returncode == 0, done.stdout
    return done.stdout


def _losses(file: Path) -> list[float]:
    with file.open() as lines:
        return [float(row["loss"]) for row in csv.DictReader(lines) if row.get("loss")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["My-x"], "must be a Python identifier in lower case"),
        (["x_"], "ends with a letter or digit"),
        (["json"], "type trainwright new my_json"),
        (["torch"], "type trainwright new my_torch"),
        (["digits"], "a recipe of this name"),
        (["a", "b"], "type trainwright new a"),
        (["there"], "choose another name"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(tmp_path, words, said):
    (tmp_path / "there").mkdir()
    done = run_command("new", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
