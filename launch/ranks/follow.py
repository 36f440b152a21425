"""Live output of ranks: lines appended to their logs, prefixed with the rank."""

from pathlib import Path

from trainwright.callbacks.monitor.sample import sampled_ranks
from trainwright.core.failures.failure import TRACEBACK_MARK, log_file

MOST_RANKS = 256
"""Largest number of ranks whose logs are followed live."""

# Limit per file and poll, so that a verbose rank does not starve the others.
_BYTES = 1 << 16


class _TailedFile:
    """A growing file that may not exist yet, read incrementally."""

    def __init__(self, path: Path, name: str, at: int) -> None:
        self._path = path
        self._name = name
        self._at = at
        self._rest = b""

    def lines(self, all_of_it: bool = False) -> list[str]:
        """Return the new complete lines; with `all_of_it`, also an unterminated last line."""
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
        mark = TRACEBACK_MARK.encode()  # the run's error has the information of the traceback
        return [f"{self._name} {_last_state(line)}" for line in whole if not line.startswith(mark)]


def _last_state(line: bytes) -> str:
    """Return the last state of a line that redraws itself, like a progress bar."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class Follower:
    """Printer of the lines appended to several files."""

    def __init__(self) -> None:
        self._files: list[_TailedFile] = []

    def add(self, path: Path, name: str, at: int = 0) -> None:
        """Follow a file, which may be created later.

        Args:
            path: of the file.
            name: prefix of its lines.
            at: bytes to skip.
        """
        self._files.append(_TailedFile(path, name, at))

    def add_ranks(self, run_dir: Path, ranks: range, title: str = "") -> None:
        """Follow the logs of ranks, `logs/rank_<n>.log`, without the output of earlier runs in the directory.

        Of more than :data:`MOST_RANKS` ranks only a sample is followed, and a line says so, because one process polls
        every file several times a second.

        Args:
            run_dir: the run directory.
            ranks: global ranks.
            title: of the run, in front of the rank; empty = there is only one run.
        """
        followed = sampled_ranks(len(ranks), MOST_RANKS)
        if len(followed) < len(ranks):
            where = log_file(run_dir, 0).parent
            self._print([f"{title}the logs of {len(followed)} of {len(ranks)} ranks are shown; all are in {where}"])
        for rank in (ranks[place] for place in followed):
            log = log_file(run_dir, rank)
            self.add(log, f"[{title}rank {rank}]", log.stat().st_size if log.is_file() else 0)

    def poll(self) -> None:
        """Print new lines."""
        self._print([line for file in self._files for line in file.lines()])

    def finish(self) -> None:
        """Print the rest, unterminated last lines included."""
        self._print([line for file in self._files for line in file.lines(all_of_it=True)])

    def _print(self, lines: list[str]) -> None:
        if lines:
            print("\n".join(lines), flush=True)
