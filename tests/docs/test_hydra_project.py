"""A project of the Lightning-Hydra template, with its own train.py and as a recipe, as its page says."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from tests.command.project import environment, run_command
from tests.docs.blocks import blocks_of
from tests.docs.project import write_project
from tests.docs.snippets import Outcome, run_page
from tests.warm import warm_run

PAGE = "docs/coming_from/lightning_hydra_template.md"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project(tmp_path, {block.value: block.text for block in blocks_of(PAGE) if block.mark == "file"})
    for name in ("callbacks", "data", "model"):
        (tmp_path / "configs" / "trainwright" / name).symlink_to(f"../{name}")
    return tmp_path


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_run() -> None:
    outcome = Outcome()
    run_page(PAGE, outcome)
    assert (outcome.failed, outcome.left_out) == ([], {})
    assert outcome.ran == 7


def losses(folder: Path) -> list[float]:
    """Return the mean training loss of each epoch that a CSV logger below a folder has written."""
    [path] = folder.glob("**/metrics.csv")
    return [float(row["train/loss"]) for row in csv.DictReader(path.open()) if row.get("train/loss")]


def test_both_ways_train_the_same(project: Path) -> None:
    script = [sys.executable, "src/train.py", "trainer=zero3"]
    done = warm_run(script, timeout=200, cwd=project, env=environment(), capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test/acc" in done.stdout
    assert len(list(project.glob("logs/rings/runs/*/checkpoints/epoch_*"))) == 1
    words = ("--config-dir", "configs/trainwright", "recipe=rings", "seed=7", "accelerator=cpu", "global_batch_size=32")
    done = run_command("fit", *words, "run_dir=here", cwd=project)
    assert done.returncode == 0, done.stdout
    assert len(list(project.glob("here/best/epoch_*"))) == 1
    assert len(losses(project / "logs")) == 4
    assert losses(project / "here") == pytest.approx(losses(project / "logs"), rel=1e-5)
