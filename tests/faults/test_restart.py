"""Runs whose ranks are killed again and again come to the same end as undisturbed ones."""

from __future__ import annotations

import csv
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.commands import LIMIT, until
from tests.faults.recipes import TINY, restart_log, write_recipe
from trainwright.command.run import run
from trainwright.command.schema.compose import compose
from trainwright.core.failures.failure import RankError
from trainwright.core.failures.records import read_steps
from trainwright.core.problems import ConfigError
from trainwright.core.processes.scratch import scratch

ALWAYS = ("recipe=tiny", "monitor=none", "logger=csv", "report=false", "checkpoint.last.every_n_steps=2")
DDP = ("strategy=ddp", "devices=2")
PIPELINE = ("strategy=pipeline", "strategy.pipeline=2", "strategy.micro_batches=2")
# The ranks of these runs are forked from the server of the suite too.
pytestmark = pytest.mark.usefixtures("ranks")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, "tiny", TINY)


def _train(conf: Path, name: str, *words: str) -> Path:
    """Run it in a directory of that name; returns the directory."""
    run_dir = conf.parent / name
    run(compose(None, [*ALWAYS, f"run_dir={run_dir}", *words], conf))
    return run_dir


def _losses(run_dir: Path) -> list[tuple[str, str]]:
    """Step and loss of every row."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [(row["step"], row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def _restarts(run_dir: Path) -> int:
    return len(re.findall(r" restart \d+", restart_log(run_dir)))


@contextmanager
def _beside(action: Callable[[], None]) -> Iterator[None]:
    """Run an action in a thread beside the block and raise its error."""
    errors: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join(LIMIT)
    if errors:
        raise errors[0]


# ---- ten kills -------------------------------------------------------------------------------------------------------


def _kills(seed: int, count: int, ranks: int, steps: int) -> list[tuple[int, int]]:
    """Ranks and steps, in order of the steps."""
    dice = random.Random(seed)
    return [(dice.randrange(ranks), step) for step in sorted(dice.sample(range(1, steps), count))]


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", [("strategy=zero3",), PIPELINE], ids=["zero3", "pipeline"])
def test_a_repeatedly_killed_run_ends_like_an_undisturbed_one(conf: Path, words: tuple[str, ...]) -> None:
    words, count = (*words, "devices=2"), 3
    undisturbed = _train(conf, "undisturbed", *words)
    faults = ", ".join(f"kill(rank={rank}, at_step={step})" for rank, step in _kills(7, count, 2, 24))
    killed = _train(conf, "killed", *words, "launch=resilient", f"+inject=[{faults}]")
    assert _restarts(killed) == count
    assert _losses(killed) == _losses(undisturbed)
    assert len(_losses(killed)) == 24
    assert [path.name for path in (killed / "checkpoints").iterdir()] == ["step=24"]  # nothing half-written is left


@pytest.mark.thorough
def test_ranks_that_are_killed_at_any_moment_lose_nothing(conf: Path) -> None:
    words = (*DDP, "module.seconds=0.01")
    undisturbed = _train(conf, "undisturbed", *words)
    plan, dice = _kills(11, 4, 2, 21), random.Random(11)
    with _beside(lambda: _kill(plan, dice, conf.parent / "killed")):
        killed = _train(conf, "killed", *words, "launch=resilient", "checkpoint=async")
    assert _restarts(killed) == len(plan)
    assert _losses(killed) == _losses(undisturbed)


def _kill(plan: list[tuple[int, int]], dice: random.Random, run_dir: Path) -> None:
    """Kill ranks at or soon after certain steps: within a step, a collective, a save."""
    for number, (rank, step) in enumerate(plan, 1):
        until(lambda: _step() >= step, f"step {step}")  # noqa: B023
        pid = _pid(run_dir, rank)
        time.sleep(dice.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        until(lambda: _restarts(run_dir) == number, f"restart {number}")  # noqa: B023


def _step() -> int:
    """Of the slowest rank of the newest attempt; -1 if not both train."""
    attempts = list(scratch().glob("run-*/attempt_*"))
    steps = read_steps(max(attempts, key=lambda path: path.stat().st_mtime_ns)) if attempts else {}
    return min(steps.values()) if len(steps) == 2 else -1


def _pid(run_dir: Path, rank: int) -> int:
    """The living process of a rank."""

    def living() -> list[int]:
        pids = [int(path.name.split(".")[1]) for path in run_dir.glob(f"pids/{rank}.*")]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    until(lambda: len(living()) > 0, f"the start of rank {rank}")
    return living()[0]


# ---- when there is no sense in it ------------------------------------------------------------------------------------


def test_a_crash_loop_ends_the_run_and_says_so(conf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError) as error:
        _train(conf, "loop", *DDP, "launch=resilient", "module.fail_at=5", "launch.backoff_seconds=0")
    text = str(error.value)
    assert "rank 1 of 2 failed with ValueError: this fails always" in text
    assert "crash loop: the same failure (ValueError at step 5) occurred 3 times in a row" in text
    assert restart_log(conf.parent / "loop").count("this fails always") >= 3
    assert _restarts(conf.parent / "loop") == 2
    assert "restart 2" in capfd.readouterr().err


def test_a_failure_before_the_first_step_is_not_restarted(conf: Path) -> None:
    with pytest.raises(RankError, match="before its first step; fix the error first"):
        _train(conf, "mistake", *DDP, "launch=resilient", "module.fail_at=0")
    assert _restarts(conf.parent / "mistake") == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize(("words", "problem"), [
    (("launch.max_restarts=-1",), "launch.max_restarts=-1: must be a whole number of at least 0"),
    (("launch.max_restarts=3", "checkpoint=none"), "every restart would start from scratch; type checkpoint=last"),
    (("launch.min_devices=1",), "launch.min_devices=1 with launch.max_restarts=0: .* type launch=resilient"),
    (("launch=resilient", "launch.min_devices=2"), "launch.min_devices=2 with devices=2: .* launch.min_devices=1"),
    (("launch=resilient", "launch.same_failure_limit=0"), "launch.same_failure_limit=0: must be a whole number"),
    (("launch=resilient", "launch.min_devices=1", *PIPELINE), "not possible with 1 to 1 devices .*type -1 for an axis"),
], ids=["negative", "no checkpoint", "no restarts", "not fewer", "limit", "layout"])  # fmt: skip
def test_what_cannot_work_is_refused(conf: Path, words: tuple[str, ...], problem: str) -> None:
    given = ["recipe=tiny", f"run_dir={conf.parent / 'refused'}", "strategy=ddp", "devices=2", *words]
    with pytest.raises(ConfigError, match=problem):
        run(compose(None, given, conf))
    assert not (conf.parent / "refused").exists()


# ---- fewer and more devices ------------------------------------------------------------------------------------------


def _close(run_dir: Path, other: Path) -> None:
    """The same losses at the same steps; sums over another number of ranks are rounded elsewhere."""
    losses, others = _losses(run_dir), _losses(other)
    assert [step for step, _ in losses] == [step for step, _ in others]
    assert [float(loss) for _, loss in losses] == pytest.approx([float(loss) for _, loss in others], rel=1e-4)


SLOW = (*DDP, "module.dropout=0.0", "module.seconds=0.05", "max_steps=40")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    conf = write_recipe(tmp_path_factory.mktemp("undisturbed"), "tiny", TINY)
    return _train(conf, "run", *SLOW, "module.seconds=0.0")


@pytest.mark.thorough
def test_a_lost_device_is_left_out_until_it_answers_again(conf: Path, undisturbed: Path) -> None:
    broken, run_dir = conf.parent / "broken", conf.parent / "lost"

    def break_and_repair() -> None:
        until(lambda: _step() >= 4, "step 4")
        broken.touch()
        os.kill(_pid(run_dir, 1), signal.SIGKILL)
        until(lambda: "device 1 is taken out of use" in restart_log(run_dir), "the loss of a device")
        broken.unlink()

    with _beside(break_and_repair):
        soon = ("launch.backoff_seconds=0", "launch.probe_seconds=0.5")
        _train(conf, "lost", *SLOW, "launch=resilient", "launch.min_devices=1", *soon, f"module.broken={broken}")
    log = restart_log(run_dir)
    assert "with 1 rank(s)" in log
    assert "device 1 answers again" in log
    assert "devices: 2 instead of 1" in log
    _close(run_dir, undisturbed)


@pytest.mark.thorough
def test_a_number_in_a_file_says_how_many_devices_may_be_used(conf: Path, undisturbed: Path) -> None:
    run_dir = conf.parent / "limited"

    def limit() -> None:
        until(lambda: _step() >= 4, "step 4")
        (run_dir / "devices").write_text("1\n")
        until(lambda: "with 1 rank(s)" in restart_log(run_dir), "going on with one device")
        (run_dir / "devices").write_text("2\n")

    with _beside(limit):
        _train(conf, "limited", *SLOW, "launch=resilient", "launch.min_devices=1")
    log = restart_log(run_dir)
    assert log.index("devices: 1 instead of 2") < log.index("devices: 2 instead of 1")
    assert "ended by" not in log
    _close(run_dir, undisturbed)
