"""Shows what ranks write into files, as it grows: each line with the name of who wrote it."""

from __future__ import annotations

from pathlib import Path

from trainwright.callbacks.monitor.sample import sampled_ranks
from trainwright.core.failures.failure import TRACEBACK_MARK, log_file

MOST_RANKS = 256
"""Ranks whose logs are shown while a run goes on."""

# Read of one file at a time, so that a rank that says very much does not keep the others from being heard.
_BYTES = 1 << 16


class _Growing:
    """A file that may not be there yet, read from where it was left."""

    def __init__(self, path: Path, name: str, at: int) -> None:
        self._path = path
        self._name = name
        self._at = at
        self._rest = b""

    def lines(self, all_of_it: bool = False) -> list[str]:
        """Whole lines that have come since; at the end of the file the last one may be a part."""
        if not self._path.is_file() or (self._path.stat().st_size == self._at and not (all_of_it and self._rest)):
            return []
        found = self._rest
        with self._path.open("rb") as file:
            file.seek(self._at)
            found += file.read() if all_of_it else file.read(_BYTES)
            self._at = file.tell()
        *whole, self._rest = found.split(b"\n")
        if all_of_it and self._rest:
            whole, self._rest = [*whole, self._rest], b""
        mark = TRACEBACK_MARK.encode()  # the run's error says what is to be known
        return [f"{self._name} {_as_shown(line)}" for line in whole if not line.startswith(mark)]


def _as_shown(line: bytes) -> str:
    """What redraws itself in one line, as bars of progress do, as it was last."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class Follower:
    """Prints the lines of several files as they grow."""

    def __init__(self) -> None:
        self._files: list[_Growing] = []

    def add(self, path: Path, name: str, from_end: bool = False, at: int = 0) -> None:
        """Follow a file, which may come later.

        Args:
            path: of the file.
            name: stands before each of its lines.
            from_end: leave out what is in it already.
            at: leave out so many bytes.
        """
        self._files.append(_Growing(path, name, path.stat().st_size if from_end and path.is_file() else at))

    def add_ranks(self, run_dir: Path, ranks: range, title: str = "") -> None:
        """Follow the logs of ranks, `logs/rank_<n>.log`, without what earlier runs in this directory have left there.

        Of more than :data:`MOST_RANKS` those of some are followed, which is said: every file is looked at several times
        a second, by one process, and nobody reads the lines of thousands.

        Args:
            run_dir: the run directory.
            ranks: global ranks.
            title: of the run, in front of the rank; empty = there is but one.
        """
        followed = sampled_ranks(len(ranks), MOST_RANKS)
        if len(followed) < len(ranks):
            where = log_file(run_dir, 0).parent
            self._print([f"{title}of {len(ranks)} ranks the logs of {len(followed)} are shown; all are in {where}"])
        for rank in (ranks[place] for place in followed):
            self.add(log_file(run_dir, rank), f"[{title}rank {rank}]", from_end=True)

    def poll(self) -> None:
        """Print what has come since."""
        self._print([line for file in self._files for line in file.lines()])

    def finish(self) -> None:
        """Print what is left, last lines without an end included."""
        self._print([line for file in self._files for line in file.lines(all_of_it=True)])

    def _print(self, lines: list[str]) -> None:
        if lines:
            print("\n".join(lines), flush=True)
