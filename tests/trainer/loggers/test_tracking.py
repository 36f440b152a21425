"""wandb and MLflow, offline: logged values, in one tracked run across resumes."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import LightningModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.command.project import command, write_project
from tests.faults.commands import Command
from tests.faults.recipes import write_recipe
from tests.trainer.loggers.wandb_files import offline_runs
from trainwright.command.run import run
from trainwright.command.schema.compose import compose

SECRET = "do-not-show-this"
RECIPE = f"""# @package _global_
name: tiny
accelerator: cpu
micro_batch_size: 4
max_steps: 8
seed: 3
module:
  _target_: tests.trainer.loggers.test_tracking.tiny
  api_key: {SECRET}
  seconds: 0.0
callbacks:
  loss:
    _target_: trainwright.callbacks.progress.global_loss.GlobalLoss
    every_n_steps: 1
data:
  _target_: tests.faults.tiny.TinyData
  batch_size: ${{micro_batch_size}}
"""
ALWAYS = ("recipe=tiny", "monitor=none", "devices=2", "checkpoint.last.every_n_steps=2", "trainer.log_every_n_steps=1")
PIPELINE = ("strategy=pipeline", "strategy.pipeline=2", "strategy.micro_batches=2")


def tiny(api_key: str, seconds: float) -> LightningModule:
    """Return a module whose hyperparameters include a secret."""
    from tests.faults.tiny import Tiny

    class Keyed(Tiny):
        def __init__(self, api_key: str, seconds: float) -> None:
            super().__init__(seconds=seconds)
            self.save_hyperparameters("api_key")

    return Keyed(api_key, seconds)


@pytest.fixture(autouse=True)
def _server(ranks: object) -> None:
    """Start the pool, which forks the ranks of these runs too."""


@pytest.fixture(autouse=True)
def _services() -> Iterator[None]:
    """Check that the wandb service of each run ends with it."""
    before = services()
    yield
    end = time.monotonic() + 20
    while (left := services() - before) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def services() -> set[str]:
    """Return the command lines of wandb services."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().replace("\0", " ")
        except OSError:  # it has just ended
            continue
        if "wandb-core" in words:
            found.add(words)
    return found


def train(conf: Path, name: str, *words: str) -> Path:
    """Run in a directory of that name; return the directory."""
    run_dir = conf.parent / name
    run(compose(None, [*ALWAYS, f"run_dir={run_dir}", *words], conf))
    return run_dir


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step in metrics.csv."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row["loss"]}


def mlflow_run(run_dir: Path, number: int = 0):
    """Return a run in the store of a run directory, the number of runs, and its losses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"file:{run_dir / 'mlflow'}")
        experiment = client.get_experiment_by_name("tiny")
        runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
        found = {each.step: each.value for each in client.get_metric_history(runs[number].info.run_id, "loss")}
        return runs[number], len(runs), found


@pytest.mark.thorough
def test_killed_pipeline_resumes_the_same_runs(tmp_path: Path) -> None:
    """Four loggers; rank 1 computes the loss, and rank 0, which logs, is killed at step 5."""
    conf = write_recipe(tmp_path, "tiny", RECIPE)
    words = ("logger=[csv,tensorboard,wandb,mlflow]", "launch=resilient", "+inject=[kill(rank=0, at_step=5)]")
    # Steps longer than wandb takes to flush.
    slow = ("module.seconds=0.3", "+logger.wandb.settings.x_transaction_log_flush_interval=0.01")
    run_dir = train(conf, "run", *PIPELINE, *words, *slow)
    expected = losses(run_dir)
    assert list(expected) == list(range(8))

    first, second = offline_runs(run_dir)
    assert first.id == second.id
    assert (first.exit_code, second.exit_code) == (None, 0)
    assert first.losses() | second.losses() == expected
    tracked, count, found = mlflow_run(run_dir)
    assert (count, tracked.info.status, found) == (1, "FINISHED", expected)
    events = EventAccumulator(str(run_dir))
    events.Reload()
    assert {each.step: each.value for each in events.Scalars("loss")} == pytest.approx(expected)

    for values in (second.config, tracked.data.params):
        assert str(values["strategy.pipeline"]) == "2"
        assert values["api_key"] == values["module.api_key"] == "***"
    written = [path for name in ("wandb", "mlflow") for path in (run_dir / name).rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]

    report = run_dir / "report.html"
    assert second.summary["report"] == tracked.data.tags["report"] == str(report)
    assert f"tiny/{first.id}, offline in {run_dir}" in report.read_text()
    assert f"run {tracked.info.run_id} of experiment tiny" in report.read_text()


@pytest.mark.thorough
def test_other_run_directory_resumes_runs_of_checkpoint(tmp_path: Path) -> None:
    """Three runs: the first, a resumed one in another directory, and one with new tracked runs."""
    conf = write_recipe(tmp_path, "tiny", RECIPE)
    words = ("strategy=ddp", "logger=[wandb,mlflow]")
    begun = train(conf, "begun", *words, "max_steps=4")
    resumed = train(conf, "resumed", *words, f"ckpt_path='{begun}/checkpoints/step=4'", "max_steps=6")
    [one], [two] = offline_runs(begun), offline_runs(resumed)
    assert one.id == two.id
    expected = losses(begun) | losses(resumed)
    assert list(expected) == list(range(6))
    assert one.losses() | two.losses() == expected
    tracked, count, found = mlflow_run(begun)
    assert (count, tracked.info.status, found) == (1, "FINISHED", expected)
    assert tracked.data.params["max_steps"] == "4"  # MLflow parameters are immutable
    assert not (resumed / "mlflow").exists()

    new = ("logger.wandb.id=new", "logger.mlflow.run_id=new")
    own = train(conf, "own", *words, *new, f"ckpt_path='{resumed}/checkpoints/step=6'", "max_steps=7")
    [three] = offline_runs(own)
    assert three.id != one.id
    assert mlflow_run(own)[2] == three.losses() == losses(own)
    kept = json.loads((own / "loggers.json").read_text())
    assert kept["wandb"]["id"] == three.id


@pytest.mark.thorough
def test_unavailable_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that refuse connections, then an invalid store; each is reported once."""
    conf = write_recipe(tmp_path, "tiny", RECIPE)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    server = "http://user:hidden@127.0.0.1:9"
    words = (
        *("strategy=ddp", "logger=[wandb,mlflow]", "max_steps=3", "logger.wandb.mode=online"),
        *("logger.wandb.settings.init_timeout=1", f"+logger.wandb.settings.base_url='{server}'"),
    )
    (tmp_path / "file").write_text("")
    for name, uri in (("server", server), ("folder", f"file:{tmp_path}/file/store")):
        run_dir = train(conf, name, *words, f"logger.mlflow.tracking_uri='{uri}'")
        assert list(losses(run_dir)) == [0, 1, 2]
        said = (run_dir / "logs" / "rank_0.log").read_text()
        assert said.count("has failed and gets no more values of this run") == 2
        assert "The logger Wandb has failed" in said
        assert "The logger MLFlow has failed" in said
        assert "Training continues" in said
        assert "hidden" not in said
        assert not (run_dir / "loggers.json").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_service_left(tmp_path: Path, number: int) -> None:
    conf = write_project(tmp_path)
    words = ("recipe=mine", "strategy=ddp", "devices=2", "monitor=none", "logger=wandb", "run_dir=run")
    endless = ("module.sleep=0.05", "max_steps=100000", "max_epochs=100000")
    started = Command(command("fit", "--config-dir", str(conf), *words, *endless))
    assert [words for words in services() if any(f"--pid {pid}" in words for pid in started.ranks())]
    os.kill(started.process.pid, number)
    assert started.end() != 0
    assert not started.left()
