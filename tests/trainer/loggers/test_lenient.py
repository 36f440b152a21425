"""Loggers that raise: the run continues, with one warning each."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment

from tests.checkpoint.foreign.test_malicious import Net, loader
from tests.faults.test_full_disk import Losses
from tests.parity.harness import make_trainer
from trainwright.command.run import plan
from trainwright.command.schema.compose import compose
from trainwright.trainer.loggers.lenient import LenientLogger, lenient
from trainwright.trainer.loggers.metrics_csv import MetricsCSV
from trainwright.trainer.loggers.runs import in_same_run, runs_before
from trainwright.trainer.loggers.wandb import Wandb

CALLS = ("experiment", "log_metrics", "log_hyperparams", "log_graph", "save", "finalize")


class Failing(Logger):
    """Raises in one of its methods.

    Args:
        where: name of the call.
        after: calls of that name that succeed.
    """

    name, version = "failing", "0"

    def __init__(self, where: str, after: int = 0) -> None:
        super().__init__()
        self.where, self.left, self.calls = where, after, []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.where:
            self.left -= 1
            if self.left < 0:
                raise ConnectionError("https://me:hidden@host is gone")

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        self._call("experiment")
        return self

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._call("log_metrics")

    def log_hyperparams(self, params: Any) -> None:
        self.params = params
        self._call("log_hyperparams")

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self._call("log_graph")

    def save(self) -> None:
        self._call("save")

    def finalize(self, status: str) -> None:
        self._call("finalize")


class Raising(Losses):
    """Fails in its third step; has a hyperparameter."""

    def __init__(self, token: str = "hidden") -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            raise KeyError("mine")
        return super().training_step(batch, batch_idx)


def fit(logger: Logger, module: Net, folder: Path) -> tuple[int, list[str]]:
    """Train with metrics.csv too; return the number of steps and the warnings."""
    loggers = [lenient(logger), MetricsCSV(str(folder))]
    trainer = make_trainer("single", {}, max_steps=4, max_epochs=-1, logger=loggers, log_every_n_steps=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, loader())
    return trainer.global_step, [text for each in told if "has failed" in (text := str(each.message))]


@pytest.mark.parametrize("where", CALLS)
def test_only_first_error_is_reported(tmp_path: Path, where: str) -> None:
    logger = Failing(where)
    steps, said = fit(logger, Losses(), tmp_path)
    assert steps == 4
    [text] = said
    assert "The logger Failing has failed" in text
    assert "ConnectionError: https://***@host is gone" in text
    assert logger.calls.count(where) == 1
    assert logger.calls[-1] == "finalize"
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 5


def test_error_disables_only_the_logger(tmp_path: Path) -> None:
    logger = Failing("log_metrics", after=2)
    steps, said = fit(logger, Losses(), tmp_path)
    assert (steps, len(said), logger.calls.count("log_metrics")) == (4, 1, 3)


def test_logger_error_does_not_hide_run_error(tmp_path: Path) -> None:
    logger = Failing("finalize")
    with pytest.raises(KeyError, match="mine"):
        fit(logger, Raising(), tmp_path)
    assert logger.calls.count("finalize") == 1
    assert logger.params == {"token": "***", "width": 2}


def test_wrapping_keeps_the_type() -> None:
    logger = Failing("nothing")
    wrapped = lenient(logger)
    assert isinstance(wrapped, Failing)
    assert isinstance(wrapped, LenientLogger)
    assert wrapped.experiment is wrapped
    assert lenient(wrapped) is wrapped
    assert type(wrapped).__name__ == "Failing"


def test_disabled_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    logger = Wandb(mode="disabled", save_dir=str(tmp_path))
    assert logger.identify() == {}
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


# ---- what is configured ----------------------------------------------------------------------------------------------


def problems(*words: str) -> list[str]:
    given = ["recipe=linear_regression", "devices=1", "accelerator=cpu", *words]
    return [text for text in plan(compose(None, given), "fit")[1] if text.startswith("logger.")]


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems("logger=[csv,tensorboard,wandb,mlflow]") == []
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in ("wandb", "mlflow") else find(name, *more)
    )
    found = problems("logger=[wandb,mlflow]")
    assert len(found) == 2
    assert 'pip install "trainwright[wandb]"' in found[0]
    assert 'pip install "trainwright[mlflow]"' in found[1]
    assert problems("logger=tensorboard") == []


def test_unknown_wandb_mode() -> None:
    [text] = problems("logger=wandb", "logger.wandb.mode=onlin")
    assert text.startswith("logger.wandb.mode=onlin: allowed are online, offline, ")


def test_offline_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    cfg = compose("digits", ["logger=[wandb,mlflow]", "run_dir=there"])
    assert (cfg.logger.wandb.mode, cfg.logger.wandb.save_dir) == ("offline", "there")
    assert (cfg.logger.mlflow.tracking_uri, cfg.logger.mlflow.save_dir) == (None, "there/mlflow")


# ---- the file that says which runs these are -------------------------------------------------------------------------


@pytest.mark.parametrize("text", [
    "", "{", "[1]", '{"wandb": 1}', '{"wandb": ["id"]}', "\x00", "[" * 50000,
    '{"wandb": {"id": "' + "a" * 2**17 + '"}}',
], ids=range(8))  # fmt: skip
def test_damaged_file_starts_new_runs(tmp_path: Path, text: str) -> None:
    (tmp_path / "loggers.json").write_text(text)
    with pytest.warns(UserWarning, match="the loggers start new runs"):
        assert runs_before(tmp_path, None) == {}


def test_untrusted_file_sets_only_ids_and_folders(tmp_path: Path) -> None:
    (tmp_path / "loggers.json").write_text(json.dumps({
        "wandb": {"id": "../../x", "_target_": "os.system", "settings": "x", "entity": "theirs", "at": "here"},
        "mlflow": {"run_id": "a1", "tracking_uri": "https://theirs", "save_dir": "/"},
        "other": {"run_id": "a1", "tracking_uri": f"file:{tmp_path}"},
        "gone": {"run_id": "a1", "tracking_uri": f"file:{tmp_path}/gone"},
    }))  # fmt: skip
    known = runs_before(tmp_path / "new", str(tmp_path / "checkpoints" / "step=4"))
    options = {"_target_": "mine", "id": None, "run_id": None, "tracking_uri": None}
    assert in_same_run(options, known["wandb"]) == options
    assert in_same_run(options, known["mlflow"]) == options | {"run_id": "a1"}
    assert in_same_run(options, known["other"]) == options | {"run_id": "a1", "tracking_uri": f"file:{tmp_path}"}
    assert in_same_run(options, known["gone"]) == options
    assert in_same_run(options | {"run_id": "b"}, known["mlflow"]) == options | {"run_id": "b"}
    assert in_same_run(options | {"run_id": "new"}, known["other"]) == options
