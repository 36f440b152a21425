"""Commands as a user types them, run to their end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_ROOT = Path(__file__).parents[1]
# Seconds after which a command that has not ended is taken to hang.
PATIENCE = 300
# Seconds that a command has to end after SIGTERM.
_GRACE = 30


def environment_of(threads: int) -> dict[str, str]:
    """This environment, with the repository importable and so many threads per process.

    Python keeps compiled modules even where the shell forbids it: installed packages have them, a checkout would not.
    """
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""}


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, output: IO[str] | int
) -> Iterator[subprocess.Popen[str]]:
    """A command, started in a folder; if it has not ended by the end of the block, it is ended, and its ranks with it.

    Args:
        command: its words.
        environment: of it.
        folder: in which it works.
        output: where it prints, as ``subprocess.Popen`` takes it.
    """
    with subprocess.Popen(
        command, env=dict(environment), cwd=folder, stdout=output, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()  # each of these launchers then ends its ranks
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()


def run_command(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """Run a command in a folder; gives what it printed.

    Raises:
        RuntimeError: with what it printed, if it failed.
        subprocess.TimeoutExpired: if it did not end; it and the ranks it started have been ended.
    """
    with started(command, environment, folder, subprocess.PIPE) as process:
        printed: str = process.communicate(timeout=PATIENCE)[0]
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{printed}")
    return printed
