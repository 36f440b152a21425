"""Killed workers of parameter servers: the others continue, and a restarted worker joins them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.recipes import TINY, restart_log, write_recipe
from trainwright.checkpoint.read.run_state import RunState
from trainwright.command.run import run
from trainwright.command.schema.compose import compose

# 64 samples in micro-batches of 4 on 2 workers: 8 steps of each an epoch.
STEPS = 24
WORDS = (
    *("recipe=tiny", "strategy=parameter_server", "devices=2", "monitor=none", "logger=csv", "report=false"),
    *("launch=resilient", "launch.recovery=rejoin", "max_steps=null", "max_epochs=3", "module.dropout=0.0"),
    "callbacks.loss=null",
)
OWN = ("strategy.server_ranks=own", "devices=3")
# The ranks of these runs are forked from the server of the suite too.
pytestmark = pytest.mark.usefixtures("ranks")


def train(folder: Path, *words: str) -> tuple[Path, str]:
    """Run it; return the run directory and the log of restarts."""
    run_dir = folder / "run"
    run(compose(None, [*WORDS, f"run_dir={run_dir}", *words], write_recipe(folder, "tiny", TINY)))
    return run_dir, restart_log(run_dir)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("consistency", "step", "more"), [
    ("sync", 3, OWN),
    ("ssp", 10, ("strategy.staleness=2",)),
    ("async", 23, ()),
    ("async", 2, ("strategy.leases=at_least_once",)),
], ids=["synchronous, dedicated server", "bounded staleness", "asynchronous, last step", "leases"])  # fmt: skip
def test_a_killed_worker_is_replaced_while_the_others_continue(
    tmp_path: Path, consistency: str, step: int, more: tuple[str, ...]
) -> None:
    words = (f"strategy.consistency={consistency}", "module.seconds=0.02", *more)
    run_dir, log = train(tmp_path, *words, f"+inject=[kill(rank=1, at_step={step})]")
    assert "rank 1 was ended by SIGKILL" in log
    assert "the others continue; rank 1 is restarted and rejoins them" in log
    assert " restart " not in log
    # The first rank kept its process, the second got a new one.
    assert [len(list((run_dir / "pids").glob(f"{rank}.*"))) for rank in (0, 1)] == [1, 2]
    (saved,) = (run_dir / "checkpoints").iterdir()
    state = RunState.open(str(saved))
    # With leases, every chunk was trained once, including those of the lost worker.
    assert (state.tree["epoch"], state.tree["global_step"]) == (3, STEPS)
    weights = [state.read(key) for key in state.keys() if key.startswith("weights/")]  # noqa: SIM118
    assert weights
    assert all(bool(tensor.isfinite().all()) for tensor in weights)


@pytest.mark.thorough
@pytest.mark.parametrize(("rank", "how"), [
    (0, ("+inject=[kill(rank=0, at_step=11)]",)),
    (2, (*OWN, "+callbacks.killer={_target_: tests.faults.tiny.KillServer, at_step: 11}")),
], ids=["beside", "own"])  # fmt: skip
def test_a_lost_server_restarts_the_run_from_the_latest_checkpoint(
    tmp_path: Path, rank: int, how: tuple[str, ...]
) -> None:
    run_dir, log = train(tmp_path, "strategy.consistency=async", "checkpoint.last.every_n_steps=4", *how)
    assert f"rank {rank} was ended by SIGKILL" in log
    assert "resuming from" in log
    assert "step=8" in log
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step={STEPS}"]
