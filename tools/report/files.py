"""Bounded, incremental reading of files that a run may still be writing: only whole lines, each once.

Run directories are untrusted: anything but a regular file (a FIFO, a device, a link) is not opened.
"""

from __future__ import annotations

import csv
import os
from errno import EINVAL
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from trainwright.core.text.bounded import open_regular, parse_json
from trainwright.tools.report.plain import is_beyond, number_of, whole_of

# Newest bytes read of one file; a run of a million steps writes more.
MOST_BYTES = 64 * 2**20
# Bytes of all monitor files, and of one.
_MOST_OF_MONITORS, _MOST_OF_MONITOR = 128 * 2**20, 8 * 2**20
_MOST_RECORDS = 400_000
_MOST_VALUES, _MOST_ROWS = 8_000_000, 1_000_000
_MOST_COLUMNS = 2000
_MOST_OF_LINE = 2**20


def read_whole(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: as :func:`open_regular`, or if it is longer than ``most_bytes``.
    """
    with open_regular(path, os.O_NOFOLLOW) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(EINVAL, f"longer than {most_bytes / 2**20:g} MiB", str(path))
    return content


def read_end(path: Path, most_bytes: int) -> tuple[bytes, int]:
    """Return the last ``most_bytes`` bytes of a file, and how many precede them.

    Raises:
        OSError: as :func:`open_regular`.
    """
    with open_regular(path, os.O_NOFOLLOW) as file:
        before = max(os.fstat(file.fileno()).st_size - most_bytes, 0)
        file.seek(before)
        return file.read(most_bytes), before


class Tail:
    """Reader of the lines appended to a file.

    Args:
        path: of the file, which need not exist yet.
        most_bytes: limit per read. Of a longer file the first line (a header) and the newest lines are read.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self.left_out = 0
        """Skipped bytes between the first line and the newest ones."""
        self.problem: str | None = None
        """Why the file cannot be read; None if it can, or does not exist."""
        self._most = most_bytes
        self._inode = -1
        self._offset = 0

    def read(self) -> tuple[bool, list[str]]:
        """Return whether the file was replaced since the last call (which invalidates what was read), and new lines.

        An incomplete line is left for the next call; a line longer than 1 MiB becomes empty.
        """
        self.problem = None
        try:
            with open_regular(self.path, os.O_NOFOLLOW) as file:
                state = os.fstat(file.fileno())
                is_new = state.st_ino != self._inode or state.st_size < self._offset
                if is_new:
                    self._inode, self._offset, self.left_out = state.st_ino, 0, 0
                head = self._skip_to_newest(file, state.st_size)
                whole, end, _ = file.read(self._most).rpartition(b"\n")
                self._offset += len(whole) + len(end)
        except FileNotFoundError:
            return False, []
        except OSError as error:
            self.problem = error.strerror or type(error).__name__
            return False, []
        lines = [*head.splitlines(), *whole.splitlines()]
        return is_new, ["" if len(line) > _MOST_OF_LINE else line.decode("utf-8", errors="replace") for line in lines]

    def _skip_to_newest(self, file: BinaryIO, size: int) -> bytes:
        file.seek(self._offset)
        if size - self._offset <= self._most:
            return b""
        head = file.readline(_MOST_OF_LINE) if self._offset == 0 else b""
        skipped_from = self._offset + len(head)
        file.seek(size - self._most)
        file.readline(self._most)  # the rest of a partial line
        self._offset = file.tell()
        self.left_out += self._offset - skipped_from
        return head if head.endswith(b"\n") else b"\n"


class MetricsFile:
    """Values of `metrics.csv` by column and step.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.tail = Tail(path)
        self.columns: dict[str, list[tuple[int, float]]] = {}
        """Column -> (step, value), by step, without empty and invalid cells. A repeated step (the run rolled back)
        replaces its value and those of later steps."""
        self.not_finite: dict[str, tuple[int, int]] = {}
        """Column -> step of the first value that is NaN, infinite or too large to draw, and their number."""
        self.skipped = 0
        """Rows without a step or with a wrong number of cells, and cells that are no numbers."""
        self.left_out = 0
        """Rows and columns beyond the limits."""
        self._header: list[str] = []

    def update(self) -> None:
        """Read appended lines."""
        is_new, lines = self.tail.read()
        if is_new:
            self.columns, self.not_finite, self.skipped, self.left_out, self._header = {}, {}, 0, 0, []
        if not self._header and lines:
            self._header = _csv_row(lines.pop(0))
            self.left_out += max(len(self._header) - _MOST_COLUMNS, 0)
        most = min(_MOST_VALUES // max(len(self._header), 1), _MOST_ROWS)
        self.left_out += max(len(lines) - most, 0)
        for line in lines[-most:]:
            self._add_row(_csv_row(line))

    def _add_row(self, row: list[str]) -> None:
        if len(row) != len(self._header) or "step" not in self._header:
            self.skipped += 1
            return
        cells = dict(islice(zip(self._header, row, strict=True), _MOST_COLUMNS))
        cells.pop("step", None)
        step = whole_of(row[self._header.index("step")])
        if step is None:
            self.skipped += 1
            return
        for name, cell in cells.items():
            if not cell:
                continue
            if name in self.not_finite and step <= self.not_finite[name][0]:
                del self.not_finite[name]  # the step was repeated
            value = number_of(cell)
            if value is not None:
                _put(self.columns.setdefault(name, []), step, value)
            elif is_beyond(cell):
                first, count = self.not_finite.get(name, (step, 0))
                self.not_finite[name] = first, count + 1
            else:
                self.skipped += 1


class MonitorFiles:
    """Records of `monitor/rank_<n>.jsonl`.

    Args:
        folder: `monitor` of a run directory.
        most_ranks: number of files that are read, those of the first ranks.
    """

    def __init__(self, folder: Path, most_ranks: int = 1024) -> None:
        self.by_rank: dict[int, list[dict[str, Any]]] = {}
        """Rank -> its records, each with a text `kind`."""
        self.skipped = 0
        """Lines that are no records."""
        self.left_out = 0
        """Bytes beyond the limit."""
        self.records_left_out = 0
        """Lines beyond the limit."""
        self.ranks_left_out = 0
        """Ranks whose files were not read."""
        self.problems: list[str] = []
        """Files that cannot be read, and why."""
        self._folder, self._most_ranks = folder, most_ranks
        self._tails: dict[int, Tail] = {}

    def update(self) -> None:
        """Read appended lines."""
        files = self._files()
        most = _MOST_RECORDS // max(len(files), 1)
        for rank, path in files:
            tail = self._tails.setdefault(rank, Tail(path, min(_MOST_OF_MONITORS // len(files), _MOST_OF_MONITOR)))
            is_new, lines = tail.read()
            if is_new:
                self.by_rank[rank] = []
            self.records_left_out += max(len(lines) - most, 0)
            for line in lines[-most:]:
                record = _record(line)
                if record is None:
                    self.skipped += 1
                else:
                    self.by_rank[rank].append(record)
        self.left_out = sum(tail.left_out for tail in self._tails.values())
        self.problems = [f"{tail.path.name}: {tail.problem}" for tail in self._tails.values() if tail.problem]

    def _files(self) -> list[tuple[int, Path]]:
        found = []
        for path in self._folder.glob("rank_*.jsonl"):
            number = path.stem.removeprefix("rank_")
            if number.isascii() and number.isdigit():
                found.append((int(number), path))
        found.sort()
        self.ranks_left_out = max(len(found) - self._most_ranks, 0)
        return found[: self._most_ranks]


def read_json(path: Path, most_bytes: int) -> Any:
    """Return the JSON document in a file; ``None`` if it does not exist.

    Raises:
        OSError: if the file cannot be read.
        ContentError: if it is no JSON, or nested too deeply.
    """
    try:
        return parse_json(read_whole(path, most_bytes))
    except FileNotFoundError:
        return None


def _put(values: list[tuple[int, float]], step: int, value: float) -> None:
    while values and values[-1][0] >= step:
        values.pop()
    values.append((step, value))


def _csv_row(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = parse_json(line.encode())
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None
