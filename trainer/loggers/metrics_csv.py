"""metrics.csv of a run that may be restarted: nothing logged is lost, and no step occurs twice."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from trainwright.core.config.masking import MaskedParameters
from trainwright.core.failures.records import write_whole

_STEP = "step"


class MetricsCSV(MaskedParameters, CSVLogger):
    """Lightning's ``CSVLogger`` for a file that resumed runs append to.

    An existing file is kept. When the first row is logged, rows of that step and later ones, which an earlier run
    logged after the checkpoint that this one resumes, are removed. Every row is written at once, in one piece, so that
    a killed process leaves all that it has logged.

    Args:
        save_dir: folder of the file, on this machine.
        name: of the run: a folder in `save_dir`; ``""``: none.
        version: a folder in that; ``""``: none.
        **options: of Lightning's logger.
    """

    def __init__(self, save_dir: str, name: str = "", version: str = "", **options: Any) -> None:
        super().__init__(save_dir, name=name, version=version, **{"flush_logs_every_n_steps": 1, **options})

    @property
    @rank_zero_experiment
    def experiment(self) -> _Writer:
        """The writer of the file; on rank 0 only."""
        if self._experiment is None:
            os.makedirs(self._root_dir, exist_ok=True)
            self._experiment = _Writer(self.log_dir)
        return self._experiment  # type: ignore[return-value]

    def finalize(self, status: str) -> None:
        """Write pending rows; after a failed run errors are ignored, as a second one would prevent its teardown."""
        with suppress(OSError) if status == "failed" else nullcontext():
            super().finalize(status)


class _Writer(ExperimentWriter):
    """Appends rows to the file, and rewrites it when a column is added or rows are removed."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._path = Path(self.metrics_file_path)
        self._started = False
        self._file: io.TextIOWrapper | None = None

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        """Keep a row until `save`."""
        if not self._started:
            with self._explained():
                self._start(step)
        super().log_metrics(metrics_dict, step)

    def save(self) -> None:
        """Write the rows logged since the last call."""
        if not self.metrics:
            return
        with self._explained():
            self._write()
        self.metrics = []

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{self._path} cannot be written ({error.strerror}): free space on the disk, or type another "
                "run_dir=...; ckpt_path=<path> resumes a checkpoint of this run"
            ) from error

    def _write(self) -> None:
        if self._record_new_keys() or self._file is None:
            self._rewrite([*_rows(self._path), *self.metrics])
        else:
            self._file.write(_text(self.metrics, self.metrics_keys))
        assert self._file is not None
        self._file.flush()

    def _start(self, step: int | None) -> None:
        self._started = True
        rows = _rows(self._path)
        if not rows:
            return
        self.metrics_keys = list(rows[0])
        if step is not None:
            rows = [row for row in rows if _is_before(row, step)]
            self._rewrite(rows)

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._file is not None:
            self._file.close()
        header = dict(zip(self.metrics_keys, self.metrics_keys, strict=True))
        write_whole(self._path, _text([header, *rows], self.metrics_keys))
        self._file = self._path.open("a", encoding="utf-8", newline="")

    def _check_log_dir_exists(self) -> None:
        """Keep the file, which Lightning deletes here."""


def _rows(path: Path) -> list[dict[str, str]]:
    """Return the complete rows of the file; a power loss may have left part of one at the end."""
    if not path.is_file():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return list(csv.DictReader(io.StringIO(whole)))


def _text(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, fieldnames=keys, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _is_before(row: Mapping[str, str], step: int) -> bool:
    try:
        return int(row.get(_STEP, "")) < step
    except ValueError:
        return True
