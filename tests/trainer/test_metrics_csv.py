"""metrics.csv of restarted runs."""

import csv
from pathlib import Path

from trainwright.trainer.loggers.metrics_csv import MetricsCSV


def _log(folder: Path, *rows: tuple[int, dict[str, float]], end: bool = False) -> None:
    """Log as one attempt; without ``end`` as if killed."""
    logger = MetricsCSV(str(folder))
    for step, metrics in rows:
        logger.log_metrics(metrics, step)
    if end:
        logger.finalize("success")


def _read(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _column(folder: Path, name: str) -> dict[int, str]:
    return {int(row["step"]): row[name] for row in _read(folder) if row[name]}


def test_rows_of_killed_process(tmp_path: Path) -> None:
    _log(tmp_path, (0, {"loss": 3.0}), (1, {"loss": 2.0}))
    assert _column(tmp_path, "loss") == {0: "3.0", 1: "2.0"}


def test_repeated_steps_appear_once(tmp_path: Path) -> None:
    _log(tmp_path, *((step, {"loss": float(step)}) for step in range(5)))
    _log(tmp_path, *((step, {"loss": step + 0.5}) for step in range(3, 6)), end=True)
    assert _column(tmp_path, "loss") == {0: "0.0", 1: "1.0", 2: "2.0", 3: "3.5", 4: "4.5", 5: "5.5"}
    assert len(_read(tmp_path)) == 6


def test_new_columns(tmp_path: Path) -> None:
    _log(tmp_path, (0, {"loss": 1.0}), (0, {"val_loss": 5.0}), (1, {"loss": 2.0}))
    _log(tmp_path, (1, {"loss": 2.5, "a, b": 1.0}))
    assert _column(tmp_path, "loss") == {0: "1.0", 1: "2.5"}
    assert _column(tmp_path, "val_loss") == {0: "5.0"}
    assert _column(tmp_path, "a, b") == {1: "1.0"}


def test_truncated_row(tmp_path: Path) -> None:
    _log(tmp_path, (0, {"loss": 1.0}), (1, {"loss": 2.25}))
    file = tmp_path / "metrics.csv"
    text = file.read_text()
    file.write_text(text[: text.rindex("25")])
    _log(tmp_path, (2, {"loss": 3.0}))
    assert _column(tmp_path, "loss") == {0: "1.0", 2: "3.0"}


def test_restart_from_scratch_replaces_rows(tmp_path: Path) -> None:
    _log(tmp_path, (0, {"loss": 1.0}), (1, {"loss": 2.0}))
    _log(tmp_path, (0, {"loss": 9.0}))
    assert _column(tmp_path, "loss") == {0: "9.0"}
