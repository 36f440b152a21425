"""Reads files that a run may still be writing to: whole lines alone, each once, and never more than a bound."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainwright.checkpoint.bounded import open_regular, parse_json, read_at_most
from trainwright.checkpoint.errors import CheckpointError

# Bytes of one file that are read, its newest; a run of a million steps writes more.
MOST_BYTES = 64 * 2**20


class Tail:
    """The lines of a file, those that were added since the last look.

    Args:
        path: of the file, which may not be there yet.
        most_bytes: that are read at once. Of a longer file the first line (a header) and the newest lines are read.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self.left_out = 0
        """Bytes between the first line and the newest ones that were not read."""
        self._most = most_bytes
        self._inode = -1
        self._offset = 0

    def read(self) -> tuple[bool, list[str]]:
        """Whether the file is another one than at the last look (so that what was read of it is void), and new lines.

        A line that has no end yet is left for the next look.
        """
        try:
            with io.BufferedReader(open_regular(self.path)) as file:
                state = os.fstat(file.fileno())
                is_new = state.st_ino != self._inode or state.st_size < self._offset
                if is_new:
                    self._inode, self._offset, self.left_out = state.st_ino, 0, 0
                head = self._pass_over(file, state.st_size)
                whole, end, _ = file.read(self._most).rpartition(b"\n")
                self._offset += len(whole) + len(end)
        except OSError:
            return False, []
        return is_new, (head + whole + end).decode("utf-8", errors="replace").splitlines()

    def _pass_over(self, file: Any, size: int) -> bytes:
        file.seek(self._offset)
        if size - self._offset <= self._most:
            return b""
        head: bytes = file.readline(self._most) if self._offset == 0 else b""
        skipped_from = self._offset + len(head)
        file.seek(size - self._most)
        file.readline(self._most)  # the rest of a line
        self._offset = file.tell()
        self.left_out += self._offset - skipped_from
        return head


class MetricsFile:
    """`metrics.csv`: the values of every column by step.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.tail = Tail(path)
        self.columns: dict[str, list[tuple[int, float]]] = {}
        """Column -> (step, value), by step; cells that are empty or no number are left out. Where a step comes again,
        since the run went back, its value and those of later steps make room."""
        self.not_finite: dict[str, int] = {}
        """Column -> values that are NaN or infinite, which `columns` leaves out."""
        self.skipped = 0
        """Rows without a step, or with another number of cells than the header has."""
        self._header: list[str] = []

    def update(self) -> None:
        """Read what was added."""
        is_new, lines = self.tail.read()
        if is_new:
            self.columns, self.not_finite, self.skipped, self._header = {}, {}, 0, []
        for row in _csv_rows(lines):
            if not self._header:
                self._header = row
            else:
                self._take(row)

    def _take(self, row: list[str]) -> None:
        cells = dict(zip(self._header, row, strict=False))
        step = number_of(cells.pop("step", None))
        if step is None or len(row) != len(self._header):
            self.skipped += 1
            return
        for name, cell in cells.items():
            if not cell:
                continue
            value = number_of(cell)
            if value is not None:
                _put(self.columns.setdefault(name, []), int(step), value)
            elif cell.strip().lower() in ("nan", "inf", "-inf"):
                self.not_finite[name] = self.not_finite.get(name, 0) + 1


class MonitorFiles:
    """`monitor/rank_<n>.jsonl`: what each rank has noted.

    Args:
        folder: `monitor` of a run directory.
        most_ranks: files that are read, those of the first ranks.
    """

    def __init__(self, folder: Path, most_ranks: int = 1024) -> None:
        self.by_rank: dict[int, list[dict[str, Any]]] = {}
        """Rank -> its records, each with a `kind` (text)."""
        self.skipped = 0
        """Lines that are no record."""
        self.left_out = 0
        """Bytes that were not read, because there were too many."""
        self.ranks_left_out = 0
        """Ranks whose files were not read."""
        self._folder, self._most_ranks = folder, most_ranks
        self._tails: dict[int, Tail] = {}

    def update(self) -> None:
        """Read what was added."""
        for rank, path in self._files():
            tail = self._tails.setdefault(rank, Tail(path, MOST_BYTES // 8))
            is_new, lines = tail.read()
            if is_new:
                self.by_rank[rank] = []
            for line in lines:
                record = _record(line)
                if record is None:
                    self.skipped += 1
                else:
                    self.by_rank[rank].append(record)
        self.left_out = sum(tail.left_out for tail in self._tails.values())

    def _files(self) -> list[tuple[int, Path]]:
        found = []
        for path in self._folder.glob("rank_*.jsonl"):
            number = path.stem.removeprefix("rank_")
            if number.isascii() and number.isdigit():
                found.append((int(number), path))
        found.sort()
        self.ranks_left_out = max(len(found) - self._most_ranks, 0)
        return found[: self._most_ranks]


def number_of(value: object) -> float | None:
    """A finite number, of a number or its text; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def time_of(record: Mapping[str, Any]) -> float:
    """When a record was noted, in seconds since the epoch; 0 if it does not say."""
    return number_of(record.get("time")) or 0.0


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """The document in a file; None where there is none, or it cannot be read."""
    try:
        with open_regular(path) as file:
            return parse_json(read_at_most(file, str(path), most_bytes))
    except (OSError, ValueError, CheckpointError):
        return None


def _put(values: list[tuple[int, float]], step: int, value: float) -> None:
    while values and values[-1][0] >= step:
        values.pop()
    values.append((step, value))


def _csv_rows(lines: list[str]) -> Iterator[list[str]]:
    for line in lines:
        try:
            yield next(csv.reader([line]), [])
        except csv.Error:
            yield []


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None
