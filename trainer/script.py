"""A script that starts its own ranks, as Lightning does: the script again, once for each other rank of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from trainwright.core.failures.failure import how_it_ended
from trainwright.core.failures.uncaught import STARTED, Uncaught, tell_uncaught
from trainwright.core.lightning_internals import _set_num_threads_if_needed, _SubprocessScriptLauncher
from trainwright.core.processes.scratch import scratch
from trainwright.core.text.messages import token_environment

# Seconds that ranks have to end once one has failed: a rank that waits for it in a collective may never notice.
_GRACE_SECONDS = 15.0
_LOOK_SECONDS = 0.5


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of scripts, whose ranks tell of an error once and leave none behind.

    Args:
        like: the launcher that Lightning has made.
        run_dir: below which `logs/` gets the tracebacks.
    """

    def __init__(self, like: _SubprocessScriptLauncher, run_dir: Path) -> None:
        super().__init__(like.cluster_environment, like.num_processes, like.num_nodes)
        self._run_dir = run_dir

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks unless they were, then call `function` in this one."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            sizes = f"{self.num_processes}/{self.num_processes * self.num_nodes}"
            os.environ[STARTED] = f"{sizes}@{scratch() / 'error_told'}"
            os.environ.update(token_environment())
            self._call_children_scripts()
            tell_uncaught(self._run_dir, self._silent_end, self._end_others)
            threading.Thread(target=self._watch, name="trainwright-ranks", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _silent_end(self) -> str | None:
        """How another rank ended that cannot have said so itself."""
        for rank, process in enumerate(self.procs, 1):
            if process.poll() not in (None, 0, 1):
                return f"rank {rank} of {len(self.procs) + 1} {how_it_ended(process.returncode)}; the others were ended"
        return None

    def _end_others(self) -> None:
        _end(self.procs, _GRACE_SECONDS)

    def _watch(self) -> None:
        """End all ranks when one has failed and this one does not end by itself."""
        while any(process.poll() is None for process in self.procs):
            if any(process.poll() for process in self.procs):
                break
            time.sleep(_LOOK_SECONDS)
        failed = next((process for process in self.procs if process.poll()), None)
        if failed is None:
            return
        time.sleep(_GRACE_SECONDS)  # this thread is gone by then if the process ends
        silent = self._silent_end()
        if silent is not None:
            Uncaught(self._run_dir).say(silent)
        _end(self.procs, 0.0)
        os.kill(os.getpid(), signal.SIGKILL)


def _end(processes: Sequence[subprocess.Popen[Any]], grace: float) -> None:
    """Wait for processes to end, then kill those that have not."""
    end = time.monotonic() + grace
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        process.kill()
