"""Killed workers of parameter servers: the others continue, and a restarted worker joins them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.recipes import write_recipe
from trainwright.checkpoint.read.run_state import RunState
from trainwright.command.run import run
from trainwright.command.schema.compose import compose

RECIPE = """# @package _global_
name: tiny
accelerator: cpu
micro_batch_size: 4
max_epochs: 3
seed: 3
module:
  _target_: tests.faults.tiny.Tiny
  dropout: 0.0
  seconds: 0.02
  fail_at: -1
  broken: ""
data:
  _target_: tests.faults.tiny.TinyData
  batch_size: ${micro_batch_size}
"""
# 64 samples in micro-batches of 4 on 2 workers: 8 steps of each an epoch.
STEPS = 24
WORDS = ("recipe=tiny", "strategy=parameter_server", "devices=2", "monitor=none", "logger=csv", "launch=resilient")


@pytest.fixture(autouse=True)
def _server(ranks: object) -> None:
    """The server of the suite is there, before any test runs; it forks the ranks of these runs too."""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, "tiny", RECIPE)


def train(conf: Path, *words: str) -> Path:
    """Run it; returns the run directory."""
    run_dir = conf.parent / "run"
    run(compose(None, [*WORDS, f"run_dir={run_dir}", *words], conf))
    return run_dir


def told(run_dir: Path) -> str:
    return (run_dir / "logs" / "restarts.log").read_text(encoding="utf-8")


def processes(run_dir: Path, rank: int) -> int:
    """Return the number of processes that trained as this rank."""
    return len(list((run_dir / "pids").glob(f"{rank}.*")))


OWN = ("strategy.server_ranks=own", "devices=3")


@pytest.mark.parametrize(
    ("consistency", "step", "more"),
    [("sync", 3, OWN), ("ssp", 10, ("strategy.staleness=2",)), ("async", 23, ())],
    ids=[
        "synchronous, in the first epoch, under a dedicated server",
        "bounded staleness, in the second",
        "asynchronous, at the last step",
    ],
)
def test_a_killed_worker_is_replaced_while_the_others_continue(
    conf: Path, consistency: str, step: int, more: tuple[str, ...]
) -> None:
    words = [f"strategy.consistency={consistency}", *more]
    run_dir = train(conf, *words, "launch.recovery=rejoin", f"+inject=[kill(rank=1, at_step={step})]")
    assert "rank 1 was ended by SIGKILL" in told(run_dir)
    assert "the others go on; rank 1 is started anew and joins them" in told(run_dir)
    assert " restart " not in told(run_dir)
    # The first rank kept its process, the second got a new one.
    assert [processes(run_dir, rank) for rank in (0, 1)] == [1, 2]
    (saved,) = (run_dir / "checkpoints").iterdir()
    state = RunState.open(str(saved))
    assert state.tree["epoch"] == 3
    assert state.tree["global_step"] == STEPS
    weights = [state.read(key) for key in state.keys() if key.startswith("weights/")]  # noqa: SIM118
    assert weights
    assert all(bool(tensor.isfinite().all()) for tensor in weights)


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        (0, ("+inject=[kill(rank=0, at_step=11)]",)),
        (2, (*OWN, "+callbacks.killer={_target_: tests.faults.tiny.KillServer, at_step: 11}")),
    ],
    ids=["beside", "own"],
)
def test_a_lost_server_restarts_the_run_from_the_latest_checkpoint(conf: Path, rank: int, how: tuple[str, ...]) -> None:
    words = ("strategy.consistency=async", "checkpoint.last.every_n_steps=4", "module.seconds=0.0")
    run_dir = train(conf, *words, "launch.recovery=rejoin", *how)
    assert f"rank {rank} was ended by SIGKILL" in told(run_dir)
    assert "going on from" in told(run_dir)
    assert "step=8" in told(run_dir)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step={STEPS}"]


def test_a_worker_that_leases_its_samples_is_replaced_too(conf: Path) -> None:
    words = ("strategy.consistency=async", "strategy.leases=at_least_once", "launch.recovery=rejoin")
    run_dir = train(conf, *words, "+inject=[kill(rank=1, at_step=2)]")
    assert "rank 1 was ended by SIGKILL" in told(run_dir)
    assert " restart " not in told(run_dir)
    assert [processes(run_dir, rank) for rank in (0, 1)] == [1, 2]
    (saved,) = (run_dir / "checkpoints").iterdir()
    tree = RunState.open(str(saved)).tree
    # Every chunk was trained once, including those leased to the lost worker.
    assert tree["epoch"] == 3
    assert tree["global_step"] == STEPS
