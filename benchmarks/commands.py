"""Commands as a user types them, run to their end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[1]
# Seconds after which a command that has not ended is taken to hang.
PATIENCE = 300


def environment_of(threads: int) -> dict[str, str]:
    """This environment, with the repository importable and so many threads per process."""
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def run_command(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """Run a command in a folder; gives what it printed.

    Raises:
        RuntimeError: with what it printed, if it failed.
        subprocess.TimeoutExpired: if it did not end; it and the ranks it started have been ended.
    """
    process = subprocess.Popen(
        command, env=dict(environment), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed = process.communicate(timeout=PATIENCE)[0]
    except BaseException:
        process.terminate()  # each of these launchers then ends its ranks
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{printed}")
    return printed
