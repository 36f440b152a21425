"""Python commands forked from the server of the rank pool, which saves them six seconds of imports.

    warm_run([sys.executable, "-m", "trainwright", "fit", "recipe=gpt"], capture_output=True)     # as subprocess.run

The process is a child of the caller, with the arguments, environment, folder, session, files and exit of a started one.
Tests that depend on a real start (imports, signals during imports) use `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.pool import Descriptor, RankPool, context

_SET_CHILD_SUBREAPER = 36  # of prctl(2)
# Fields of /proc/self/stat: addresses of the arguments and the environment that the kernel shows.
_WORDS, _ENVIRONMENT = 48, 50
# Modules that an agent starts, also by forking.
_STARTED = {"trainwright", "trainwright.command.engine_rank"}
_cold_server, _cold_fork = multiprocessing.util.spawnv_passfds, subprocess._fork_exec  # type: ignore[attr-defined]


class WarmPopen(subprocess.Popen[Any]):
    """:class:`subprocess.Popen` of ``[sys.executable, "-m", module, ...]``, ``"-c", code`` or the path of a script."""

    def _execute_child(self, *args: Any) -> None:
        cold, subprocess._fork_exec = subprocess._fork_exec, _forked_by_server  # type: ignore[attr-defined]
        try:
            super()._execute_child(*args)  # type: ignore[misc]
        finally:
            subprocess._fork_exec = cold  # type: ignore[attr-defined]


def warm_run(
    words: Sequence[str | os.PathLike[str]], timeout: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """:func:`subprocess.run` of such words; what it printed is text."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with WarmPopen(words, text=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


@dataclass(frozen=True)
class _Asked:
    """Arguments of `_posixsubprocess.fork_exec`."""

    words: list[str]
    environment: dict[bytes, bytes]
    folder: str
    new_session: bool

    @classmethod
    def of(cls, *asked: Any) -> tuple[_Asked, list[int]]:
        """Return them, and the descriptors of standard input, output and error."""
        words, _, _, _, folder, environment, stdin, _, _, stdout, _, stderr, _, _, _, new_session = asked[:16]
        variables = os.environb if environment is None else dict(each.split(b"=", 1) for each in environment)
        found = cls([os.fsdecode(word) for word in words], dict(variables), os.path.abspath(folder or "."), new_session)
        return found, [number if given == -1 else given for number, given in enumerate((stdin, stdout, stderr))]


def _forked_by_server(*asked: Any) -> int:
    """Replace `fork_exec`; return the process id of a child of this process."""
    wanted, files = _Asked.of(*asked)
    RankPool.warm()
    ours, theirs = context.Pipe(duplex=False)
    told = (theirs, wanted, [Descriptor(number) for number in files])
    process = context.Process(target=_fork_again, args=told)
    # The intermediate process ends at once, so that this one adopts the new one.
    _adopt(True)
    try:
        with chdir("/"):
            process.start()
        theirs.close()
        pid = ours.recv()
        process.join()
    finally:
        _adopt(False)
        ours.close()
    return int(pid)


def _adopt(orphans: bool) -> None:
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)


def _fork_again(starter: Connection, wanted: _Asked, files: list[Descriptor]) -> None:
    between = os.getpid()
    pid = os.fork()
    if pid:
        starter.send(pid)
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)
    _become(wanted, [file.number for file in files])


def _forked_here(*asked: Any) -> int:
    """Replace `fork_exec` in a forked process, for what an agent starts."""
    wanted, files = _Asked.of(*asked)
    if "-m" not in wanted.words[:-1] or wanted.words[wanted.words.index("-m") + 1] not in _STARTED:
        return int(_cold_fork(*asked))
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads; none of them is used
        pid = os.fork()
    if pid == 0:
        atexit._clear()
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        _become(wanted, files)
    return pid


def _become(wanted: _Asked, files: list[int]) -> NoReturn:
    """Make this process look newly started, apart from its modules."""
    words, environment = wanted.words, wanted.environment
    for number, file in enumerate([os.dup(file) for file in files]):
        os.dup2(file, number)
    if wanted.new_session:
        os.setsid()
    os.closerange(3, 4096)
    os.chdir(wanted.folder)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # those that are ignored stay so
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    before = dict(os.environb)
    os.environ.clear()
    os.environb.update(environment)
    _show(_WORDS, [os.fsencode(word) for word in words])
    # New variables first, in case not all fit.
    variables = sorted(environment.items(), key=lambda item: item in before.items())
    _show(_ENVIRONMENT, [b"=".join(item) for item in variables])
    sys.stdin, sys.orig_argv = open(0, closefd=False), list(words)  # noqa: SIM115
    sys.path[:0] = [wanted.folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    tempfile.tempdir = None
    _forget_multiprocessing()
    _end(words[1:])


def _forget_multiprocessing() -> None:
    """Reset multiprocessing: no parent, and a server and a tracker of its own."""
    multiprocessing.forkserver._forkserver.__init__()  # type: ignore[attr-defined, misc]
    multiprocessing.resource_tracker._resource_tracker.__init__()  # type: ignore[attr-defined, misc]
    multiprocessing.set_start_method(None, force=True)
    [main] = (each for each in multiprocessing.process.BaseProcess.__subclasses__() if each.__name__ == "_MainProcess")
    multiprocessing.process._current_process = main()  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _server  # type: ignore[attr-defined]
    subprocess._fork_exec = _forked_here  # type: ignore[attr-defined]


def _end(words: list[str]) -> NoReturn:
    """Run the arguments of an interpreter, and exit as it does."""
    code = 0
    try:
        _run(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def _run(words: list[str]) -> None:
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        words = words[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    code = words[1] if words[0] == "-c" else Path(words[0]).read_text(encoding="utf-8")
    sys.argv = words if words[0] != "-c" else ["-c", *words[2:]]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if words[0] != "-c":
        main.__file__, sys.path[0] = words[0], str(Path(words[0]).parent.resolve())
    exec(compile(code, words[0] if words[0] != "-c" else "<string>", "exec"), main.__dict__)


def _server(path: bytes, words: list[str | bytes], files: Sequence[int]) -> int:
    """Replace `multiprocessing.util.spawnv_passfds`: fork the fork server from this process while it has one thread."""
    code = os.fsdecode(words[-1])
    if "forkserver" not in code or len(os.listdir("/proc/self/task")) > 1:
        return int(_cold_server(path, words, files))
    pid = os.fork()
    if pid:
        return pid
    kept = sorted({0, 1, 2, *files})
    for below, above in zip(kept, [*kept[1:], 4096], strict=True):
        os.closerange(below + 1, above)
    _show(_WORDS, [os.fsencode(word) for word in words])
    _forget_multiprocessing()
    _end(["-c", code])


def _show(field: int, parts: Sequence[bytes]) -> None:
    """Overwrite the arguments or environment that the kernel shows of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[number - 3]) for number in (field, field + 1))
    ctypes.memmove(start, b"\0".join(parts)[: end - start - 1].ljust(end - start, b"\0"), end - start)
