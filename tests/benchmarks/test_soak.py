"""The soak passes intact runs and reports anything lost or left behind."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import __main__ as soak
from benchmarks.soak.bench import Story
from benchmarks.soak.checks import (
    ENDS,
    FILES,
    LOST,
    Hashes,
    Wrong,
    check_checkpoints,
    check_end,
    check_files,
    check_story,
    check_temporary,
    hashes_of,
    kinds_of_files,
)
from benchmarks.soak.killer import COMMAND, DELETION, EVERY, RECOVERY, SAVE, Instants, Kill
from benchmarks.soak.left import abandoned, segments
from benchmarks.soak.plan import draw_kills, draw_run
from tests.checkpoint import small
from tests.pool import ROOT
from trainwright.checkpoint.read.find import list_checkpoints

INSTANTS = {SAVE: {0: 7, 1: 1}, DELETION: {0: 8, 1: 0}, RECOVERY: {0: 30, 1: 7, COMMAND: 20}}


def saved(folder: Path, *steps: int) -> Hashes:
    """Write checkpoints and give their hashes."""
    for step in steps:
        small.write(folder / f"step={step}", step)
    return {found.step: hashes_of(found) for found in list_checkpoints(folder)}


def kinds(wrong: list[Wrong]) -> list[str]:
    return [each.kind for each in wrong]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_whole_checkpoints_are_right(tmp_path: Path) -> None:
    known = saved(tmp_path, 3, 4)
    assert check_checkpoints(tmp_path, 4, 2, known, one_name=False) == (4, [])
    assert check_checkpoints(tmp_path, 3, 2, known, one_name=False) == (4, [])  # one that was not reported


def test_a_checkpoint_that_is_gone_is_lost(tmp_path: Path) -> None:
    known = saved(tmp_path, 3, 4)
    shutil.rmtree(tmp_path / "step=4")
    newest, wrong = check_checkpoints(tmp_path, 4, 1, known, one_name=False)
    assert newest == 3
    assert wrong == [Wrong(LOST, "step 4 was saved; there are [3]")]


def test_an_older_one_that_is_kept_is_lost(tmp_path: Path) -> None:
    known = saved(tmp_path, 3, 4)
    shutil.rmtree(tmp_path / "step=3")
    assert kinds(check_checkpoints(tmp_path, 4, 2, known, one_name=False)[1]) == [LOST]
    assert kinds(check_checkpoints(tmp_path, 4, 1, known, one_name=False)[1]) == []


@pytest.mark.parametrize("step", [3, 4])
def test_a_byte_that_has_changed_is_a_loss(tmp_path: Path, step: int) -> None:
    known = saved(tmp_path, 3, 4)
    file = next((tmp_path / f"step={step}").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert LOST in kinds(check_checkpoints(tmp_path, 4, 2, known, one_name=False)[1])


def test_a_state_that_no_undisturbed_run_has_is_a_loss(tmp_path: Path) -> None:
    known = saved(tmp_path / "undisturbed", 3, 4)
    small.write(tmp_path / "run" / "step=3", 3)
    small.write(tmp_path / "run" / "step=4", 5)  # is whole, and says that it is of step 5
    newest, wrong = check_checkpoints(tmp_path / "run", 4, 1, known, one_name=False)
    assert newest == 3
    assert LOST in kinds(wrong)


# ---- commands --------------------------------------------------------------------------------------------------------


def test_an_attempt_begins_where_the_last_checkpoint_is() -> None:
    attempts: list[dict[str, Any]] = [
        {"attempt": 0, "started": 5, "hidden": []},
        {"saved": 6},
        {"kill": SAVE},
        {"attempt": 1, "started": 7, "hidden": []},
    ]
    assert check_story(attempts, 5) == (7, [])
    assert kinds(check_story(attempts, 6)[1]) == [LOST]
    assert kinds(check_story(attempts, 4)[1]) == [LOST]
    assert kinds(check_story([*attempts[:3], {"attempt": 1, "started": 5, "hidden": []}], 5)[1]) == [LOST]
    assert kinds(check_story([{"attempt": 0, "started": 5, "hidden": [".step=6.partial-1"]}], 5)[1]) == [FILES]


@pytest.mark.parametrize(
    ("victims", "done", "code"),
    [([], 0, 0), ([0], 1, 1), ([EVERY], 1, 1), ([COMMAND], 1, -9), ([0, COMMAND], 2, -9), ([0, COMMAND], 1, 0)],
)
def test_a_command_ends_as_it_was_killed(victims: list[int], done: int, code: int) -> None:
    kills = [Kill(SAVE, 0, 0, 0.0, victim) for victim in victims]
    assert check_end(code, kills, done) == []
    assert kinds(check_end(None, kills, done)) == [ENDS]
    assert kinds(check_end(code + 2, kills, done)) == [ENDS]


def test_files_that_are_left_are_found(tmp_path: Path) -> None:
    (tmp_path / "trainwright-12-abc").mkdir()
    assert check_temporary(tmp_path, killed=12) == []
    assert kinds(check_temporary(tmp_path, killed=None)) == kinds(check_temporary(tmp_path, killed=1)) == [FILES]
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "rank_1.log").touch()
    small.write(tmp_path / "run" / "checkpoints" / "last", 3)
    known = {*kinds_of_files(tmp_path / "run")}
    assert known >= {"logs/rank_#.log", "checkpoints/*/manifest.json"}
    shutil.move(tmp_path / "run" / "checkpoints" / "last", tmp_path / "run" / "checkpoints" / "step=3")
    assert check_files(tmp_path / "run", known) == []
    (tmp_path / "run" / "checkpoints" / ".step=3.partial-1").mkdir()
    assert kinds(check_files(tmp_path / "run", known)) == [FILES]
    (tmp_path / "run" / "checkpoints" / ".step=3.partial-1").rmdir()
    (tmp_path / "run" / "logs" / ".rank_1.log.new").touch()
    assert kinds(check_files(tmp_path / "run", known)) == [FILES]


def test_an_unused_segment_is_found() -> None:
    path = Path(f"/dev/shm/soak-test-{os.getpid()}")
    before = segments()
    try:
        with path.open("wb"):
            assert path.name in segments() - before
            assert path.name not in abandoned(segments() - before)
        assert path.name in abandoned(segments() - before)
    finally:
        path.unlink()


ORPHAN = """
import subprocess, sys
from benchmarks.soak.left import Family, adopt_orphans

adopt_orphans()
family = Family()
shell = subprocess.Popen(["sh", "-c", "setsid sleep 600 & setsid sleep 0.2 & exit 3"])
assert family.wait(shell.pid, 10) == 3
left = family.left(1)
assert [words for words in left.values()] == ["sleep 600"], left
family.end()
assert family.left(0) == {}
"""


def test_a_process_that_is_left_is_found_and_ended() -> None:
    subprocess.run([sys.executable, "-c", ORPHAN], cwd=ROOT, check=True, timeout=60)


# ---- instants --------------------------------------------------------------------------------------------------------


def test_instants_belong_to_phases() -> None:
    acted: list[str] = []
    instants = Instants("/run/", Kill(SAVE, 0, 2, 0.0, 0), acted.append)
    instants("open", ("/x/run/checkpoints/step=1/manifest.json", "r", 0))
    instants("open", ("/x/elsewhere", "r", 0))
    assert instants.counts == {RECOVERY: 1}
    instants.recovers = False
    instants("open", ("/x/run/checkpoints/step=1/manifest.json", "r", 0))
    partial = "/x/run/checkpoints/.step=2.partial-1"
    instants("os.mkdir", (partial, 0o777, -1))
    instants("open", (f"{partial}/rank_0.safetensors", "xb", 0))
    assert acted == []
    instants("os.rename", (partial, "/x/run/checkpoints/step=2", -1, -1))
    assert acted == [SAVE]
    assert instants.counts == {RECOVERY: 1, SAVE: 3}


def test_a_deletion_lasts_until_the_folder_goes(tmp_path: Path) -> None:
    instants = Instants("/run/", None, lambda phase: None)
    instants.recovers = False
    instants("os.rename", (str(tmp_path / "gone"), str(tmp_path / ".gone.removed-1"), -1, -1))  # does nothing
    assert instants.counts == {}
    removed = str(tmp_path / ".step=1.removed-1")
    instants("os.rename", (str(tmp_path), removed, -1, -1))
    instants("os.remove", ("manifest.json", 7))
    instants("os.rmdir", (removed, -1))
    instants("os.remove", ("another", 7))
    assert instants.counts == {DELETION: 3}
    assert instants.phase == DELETION


def test_kills_follow_from_the_seed_and_hit_everything() -> None:
    drawn = [draw_run(1, number, ["ddp", "zero3"], ["sync", "async"]) for number in range(200)]
    again = draw_run(1, 7, ["ddp", "zero3"], ["sync", "async"])
    plans = [draw_kills(run.draw, INSTANTS, 8, resumes=True) for run in drawn]
    assert plans[7] == draw_kills(again.draw, INSTANTS, 8, resumes=True)
    kills = [kill for plan in plans for kill in plan]
    assert {(kill.phase, kill.victim) for kill in kills} == {
        (phase, victim) for phase in (SAVE, DELETION, RECOVERY) for victim in (0, 1, EVERY, COMMAND)
    }
    assert {(run.strategy, run.mode, run.one_name) for run in drawn} == {
        (strategy, mode, one) for strategy in ("ddp", "zero3") for mode in ("sync", "async") for one in (True, False)
    }
    assert all(kill.victim != COMMAND for plan in plans for kill in plan[:-1])
    assert all(draw_kills(random.Random(n), INSTANTS, 8, resumes=False)[0].phase != RECOVERY for n in range(100))


# ---- all together ----------------------------------------------------------------------------------------------------

ROUNDS = """
import json, os, shutil, sys
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
from pathlib import Path
from benchmarks.soak import bench as soak_bench
from benchmarks.soak.bench import Bench
from benchmarks.soak.forked import load
from benchmarks.soak.left import adopt_orphans
from benchmarks.soak.plan import draw_run
from trainwright.checkpoint.read.find import list_checkpoints

soak_bench._STEPS = 16  # more than three kills take

class Losing(Bench):
    loses = False

    def _look(self, story, *how):
        if self.loses:
            shutil.rmtree(list_checkpoints(self.folder / "killed_run/checkpoints")[0].path)
        super()._look(story, *how)

stories, bench = [], Losing(Path(sys.argv[1]))
try:
    load("benchmarks.soaked")
    adopt_orphans()
    known = bench.undisturbed("ddp")
    stories.append(bench.run(draw_run(1, 0, ["ddp"], ["async"]), known, 3))
    bench.loses = True
    stories.append(bench.run(draw_run(1, 1, ["ddp"], ["async"]), known, 1))
finally:
    bench.family.end()
print(json.dumps([[story.kills, [[wrong.kind, wrong.text] for wrong in story.wrong]] for story in stories]))
"""


@pytest.mark.thorough
def test_kills_lose_nothing_and_a_loss_is_reported(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ROUNDS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    (kills, wrong), (_, lost) = json.loads(ended.stdout.splitlines()[-1])
    assert len(kills) == 3
    assert wrong == []
    assert [kind for kind, text in lost if "was saved; there are" in text] == [LOST]


@pytest.mark.parametrize(("wrong", "code"), [([], 0), ([Wrong(LOST, "step 3 is not there")], 1)])
def test_the_exit_code_says_whether_goals_hold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, wrong: list[Wrong], code: int
) -> None:
    story = Story(draw_run(1, 0, ["zero3"], ["sync"]), 5, [(SAVE, EVERY)] * 8, wrong)
    options = argparse.Namespace(kills=8, seed=1)
    assert soak._print([story], options, 10.0, tmp_path) == code
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["rows"][-1]["kills"] == line["rows"][-1][SAVE] == 8
    assert line["rows"][-1]["lost"] == len(wrong)
    options.kills = 9
    assert soak._print([story], options, 10.0, tmp_path) == 1
