"""Commands as a user types them, forked from this process, which has imported everything.

A command takes five seconds to start, nearly all of it imports: its own, and once more those of the fork server that it
starts for its ranks. Here both begin as forks of this process. All else is as ever: the command runs
``trainwright.command.cli.main``, and ranks are forked from its fork server.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainwright.core.processes.orphans import end_with_parent
from trainwright.core.processes.scratch import scratch

# Of `trainwright.launch.ranks.preload` all but the module itself, which makes a fork server of who imports it.
_LOADED = (
    "trainwright.command.verbs",
    "trainwright.launch.local.local",
    "trainwright.launch.ranks.progress",
    "trainwright.launch.rank",
    "trainwright.launch.worker",
    "trainwright.tools.report.page",
)
_spawn = multiprocessing.util.spawnv_passfds


def load(*more: str) -> None:
    """Import what commands and ranks need, and these modules; this process must have one thread, then and later."""
    for name in (*_LOADED, *more):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no fork looks through it for garbage


def fork_command(run: Callable[[], int], folder: Path, environment: Mapping[str, str], output: Path) -> int:
    """Start a command in a session of its own, which ends with this process; gives its process id.

    Args:
        run: what the process does: runs the command and gives its exit code.
        folder: in which it works.
        environment: variables besides those of this process.
        output: file that it prints to.
    """
    if threading.active_count() > 1:
        raise RuntimeError(f"only a process with one thread can be forked safely; here are {threading.enumerate()}")
    here = os.getpid()
    process = os.fork()
    if process == 0:
        _become_command(here, run, folder, environment, output)
    return process


def _become_command(
    parent: int, run: Callable[[], int], folder: Path, environment: Mapping[str, str], output: Path
) -> NoReturn:
    code = 1
    try:
        end_with_parent(parent)
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        os.chdir(folder)
        os.environ.update(environment)
        tempfile.tempdir = None  # found anew
        file = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)
        multiprocessing.util.spawnv_passfds = _spawn_or_fork
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> NoReturn:
    """As an interpreter ends; not into the frames below, which are those of the process that was forked."""
    try:
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _spawn_or_fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """In place of ``multiprocessing.util.spawnv_passfds``: the fork server begins as a fork."""
    if "multiprocessing.forkserver" not in args[-1]:
        return _spawn(path, args, passfds)
    process = os.fork()
    if process == 0:
        _become_server(args[-1], passfds)
    return process


def _become_server(program: str, descriptors: Sequence[int]) -> NoReturn:
    """Reset this process to the state of a new interpreter that has only these descriptors."""
    code = 1
    try:
        _close_all_but({0, 1, 2, *map(int, descriptors)})
        servers: tuple[Any, ...] = (
            multiprocessing.forkserver._forkserver,
            multiprocessing.resource_tracker._resource_tracker,
        )
        for server in servers:
            server.__init__()
        scratch.cache_clear()
        exec(program, {})
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _close_all_but(kept: set[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError:
                continue  # that of the listing
