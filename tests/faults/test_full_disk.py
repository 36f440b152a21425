"""Behaviour and messages of a run whose files cannot be written."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import warnings
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.tensorflow_stub.io import gfile

from tests.checkpoint.foreign.test_malicious import Net, loader
from tests.parity.harness import make_trainer
from trainwright.callbacks.monitor.records import MonitorFile, records_path
from trainwright.callbacks.monitor.step_time import StepTime
from trainwright.command.run import plan
from trainwright.command.schema.compose import compose
from trainwright.core.failures.failure import Failure, write_traceback
from trainwright.launch.worker import _RankLog
from trainwright.trainer.loggers.metrics_csv import MetricsCSV
from trainwright.trainer.loggers.tensorboard import TensorBoard


@pytest.fixture
def of_threads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record uncaught exceptions of threads."""
    found: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    return found


class Losses(Net):
    """Has a value to log in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Logging(Losses):
    """Writes to TensorBoard by itself, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.logger.experiment.add_text("mine", "text", self.global_step)
        self.logger.experiment.flush()
        return loss


def fit_with(logger: Logger, module: Net | None = None) -> int:
    """Train; returns how many steps were made."""
    trainer = make_trainer("single", {}, max_steps=8, max_epochs=-1, logger=logger, log_every_n_steps=1)
    trainer.fit(module or Logging(), loader())
    return int(trainer.global_step)


class Disk:
    """Disk that fails after a number of TensorBoard's writes.

    Args:
        patch: installs it between TensorBoard and the file system.
        at: writes that succeed.
        number: of the error.
    """

    def __init__(self, patch: pytest.MonkeyPatch, at: int, number: int) -> None:
        self._left, self._number = at, number
        for name in ("append", "write"):
            real = getattr(gfile.LocalFileSystem, name)
            patch.setattr(gfile.LocalFileSystem, name, partialmethod(partial(self._write, real)))

    def _write(self, real: Any, *args: Any, **more: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise OSError(self._number, os.strerror(self._number))
        return real(*args, **more)


@pytest.mark.parametrize("at", [0, 1, 4])
def test_training_continues_when_tensorboard_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_threads: list[Any], at: int
) -> None:
    """A full and a broken disk at one of the first five writes to the event file."""
    for number in (errno.ENOSPC, errno.EIO):
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            Disk(patch, at, number)
            assert fit_with(TensorBoard(str(tmp_path / str(number)))) == 8
        said = [str(each.message) for each in told if "TensorBoard" in str(each.message)]
        assert len(said) == 1, said
        assert os.strerror(number) in said[0]
        assert "training continues" in said[0]
        assert "\n" not in said[0]
        assert of_threads == []


def test_an_event_file_that_can_be_written_has_everything(tmp_path: Path) -> None:
    fit_with(TensorBoard(str(tmp_path)))
    [file] = tmp_path.glob("events*")
    tags = [value.tag for each in EventFileLoader(str(file)).Load() for value in each.summary.value]
    assert tags.count("loss") == 8
    assert tags.count("mine/text_summary") == 8


def test_steps_after_the_resumed_one_are_purged(tmp_path: Path) -> None:
    logger = TensorBoard(str(tmp_path), purge_step=3)
    logger.log_metrics({"loss": 1.0}, 3)
    logger.finalize("success")
    [file] = tmp_path.glob("events*")
    events = list(EventFileLoader(str(file)).Load())
    assert [each.step for each in events] == [0, 3, 3, 3]


def test_records_that_cannot_be_written_do_not_end_a_run(tmp_path: Path, of_threads: list[Any]) -> None:
    """Each of eight steps has records to write, into ``/dev/full``."""
    (tmp_path / "monitor").mkdir()
    records_path(tmp_path, 0).symlink_to("/dev/full")
    found = [StepTime(every_n_steps=1), MonitorFile(str(tmp_path))]
    trainer = make_trainer("single", {}, max_steps=8, max_epochs=-1, callbacks=found)
    with pytest.warns(RuntimeWarning, match="No space left on device.*training continues") as told:
        trainer.fit(Net(), loader())
    assert trainer.global_step == 8
    assert len([each for each in told if "training continues" in str(each.message)]) == 1


def test_metrics_that_cannot_be_written_end_a_run_in_one_paragraph(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    (tmp_path / ".metrics.csv.partial").symlink_to(kept)  # never written through
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(OSError, match=r"metrics\.csv cannot be written \(Is a directory\): free") as raised:
        fit_with(MetricsCSV(str(tmp_path)), Losses())
    assert Failure.of(raised.value, 0).is_refusal
    assert kept.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hparams.yaml", "kept", "metrics.csv"]


def test_a_log_that_cannot_be_written_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    """A hundred records into ``/dev/full``."""
    handler = _RankLog("/dev/full")
    for number in range(100):
        handler.handle(logging.LogRecord("trainwright", logging.INFO, "", number, "text", None, None))
    with contextlib.suppress(OSError):
        handler.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.thorough
def test_links_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three places of a broken link in ``run_dir``: it, a folder above it, and a link to itself."""
    monkeypatch.chdir(tmp_path)
    Path("broken").symlink_to("missing/folder")
    Path("loop").symlink_to("loop")
    for run_dir, link, target in (
        ("broken", "broken", "missing/folder"),
        ("broken/a/b", "broken", "missing/folder"),
        ("loop", "loop", "loop"),
    ):
        _, problems = plan(compose("linear_regression", [f"run_dir={run_dir}", "devices=1"]), "fit")
        [problem] = [each for each in problems if each.startswith("run_dir=")]
        assert f"{link} is a link to {target}, which does not exist" in problem
        assert "type another run_dir=" in problem
    assert sorted(os.listdir()) == ["broken", "loop"]
    Path("real").mkdir()
    Path("good").symlink_to("real")
    assert plan(compose("linear_regression", ["run_dir=good/run", "devices=1"]), "fit")[1] == []


class Odd(ValueError):
    """An error whose text is computed by a function."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.text = text

    def __str__(self) -> str:
        return self.text()  # type: ignore[no-any-return]


class Notes(Odd):
    __notes__ = 7


def endless() -> str:
    return endless()


@pytest.mark.parametrize("error", [
    Odd(lambda: 1 / 0),
    Odd(lambda: 7),
    Odd(lambda: None),
    Odd(endless),
    Odd(lambda: [][0]),
    Notes(lambda: "text"),
    Odd(lambda: "\ud800 half a character"),
], ids=range(7))  # fmt: skip
def test_an_error_without_a_text_is_reported_in_one_paragraph(tmp_path: Path, error: Exception) -> None:
    """Seven errors whose text raises, is none, or cannot be encoded."""
    try:
        raise error
    except Odd as raised:
        failure = Failure.of(raised, 0)
        write_traceback(raised, tmp_path / "rank_0.log")
    told = failure.paragraph("rank 0 of 2", "", tmp_path / "rank_0.log")
    assert f"failed with {type(error).__name__}: " in told
    assert "\n\n" not in told
    assert "test_full_disk.py" in (tmp_path / "rank_0.log").read_text(encoding="utf-8")
