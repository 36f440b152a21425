"""Forked processes whose system calls on files below a folder fail as those of a broken or full disk do.

Linux's seccomp hands each such call to this process, which lets the kernel run it or answers it with an
error. So the calls of all threads and libraries are met, native ones included, and nothing is compiled. Left out are
calls that reach no disk (``lseek``, ``fcntl``, ``ioctl``, ``mmap``). A ``close`` that fails leaves the file open.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import fcntl
import os
import platform
import re
import select
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

# Name: number on x86_64 and on aarch64 (-1: it has none), and where its arguments name files: `f0` a descriptor, `p0` a
# path, `d0` a path relative to the folder that the argument before it names.
_TABLE = """
read 0 63 f0; write 1 64 f0; open 2 -1 p0; close 3 57 f0; stat 4 -1 p0; fstat 5 80 f0; lstat 6 -1 p0;
pread64 17 67 f0; pwrite64 18 68 f0; readv 19 65 f0; writev 20 66 f0; access 21 -1 p0; sendfile 40 71 f0 f1;
fsync 74 82 f0; fdatasync 75 83 f0; truncate 76 45 p0; ftruncate 77 46 f0; rename 82 -1 p0 p1; mkdir 83 -1 p0;
rmdir 84 -1 p0; creat 85 -1 p0; link 86 -1 p0 p1; unlink 87 -1 p0; symlink 88 -1 p1; readlink 89 -1 p0;
chmod 90 -1 p0; fchmod 91 52 f0; statfs 137 43 p0; fstatfs 138 44 f0; getdents64 217 61 f0; openat 257 56 d1;
mkdirat 258 34 d1; newfstatat 262 79 d1; unlinkat 263 35 d1; renameat 264 38 d1 d3; linkat 265 37 d1 d3;
symlinkat 266 36 d2; readlinkat 267 78 d1; fchmodat 268 53 d1; faccessat 269 48 d1; utimensat 280 88 d1;
sync_file_range 277 84 f0; fallocate 285 47 f0; preadv 295 69 f0; pwritev 296 70 f0; renameat2 316 276 d1 d3;
copy_file_range 326 285 f0 f2; statx 332 291 d1; openat2 437 437 d1; faccessat2 439 439 d1
"""
_ALLOCATING = re.compile(
    "write|pwrite64|writev|pwritev|sendfile|copy_file_range|fallocate|ftruncate|fsync|fdatasync|sync_file_range|"
    "mkdir(at)?|rename(at2?)?|link(at)?|symlink(at)?|creat"
)
_OPEN_FLAGS = {"open": 1, "openat": 2}
_NOTHING = -100  # AT_FDCWD

_SECCOMP = {"x86_64": 317, "aarch64": 277}
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
_NOTICE, _ANSWER = struct.Struct("=QII iIQ6Q"), struct.Struct("=QqiI")
_CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
_LONGEST_PATH = 4096


class SystemCall(NamedTuple):
    """A system call that concerns files below the folder.

    Attributes:
        name: such as ``openat``.
        paths: of the files, one or two.
        allocates: whether it can need space on the disk.
    """

    name: str
    paths: tuple[str, ...]
    allocates: bool

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.paths)})"


Errors = Callable[[SystemCall], int]
"""Gives the error number that a call ends with; 0: it is made."""


@dataclass
class Ended:
    """How a process ended.

    Attributes:
        code: its exit code; negative: minus the number of the signal that ended it.
        said: what it printed on both streams.
        calls: that concerned the folder, in their order.
        failed: those of them that failed.
    """

    code: int = 0
    said: str = ""
    calls: list[SystemCall] = field(default_factory=list)
    failed: list[SystemCall] = field(default_factory=list)


@cache
def why_not() -> str | None:
    """Return why calls cannot be supervised here; None: they can."""
    if sys.platform != "linux" or platform.machine() not in _AUDIT:
        return f"seccomp filters are written for Linux on {' and '.join(_AUDIT)} only"
    ended = run(lambda: os.close(os.open("/", os.O_RDONLY)), "/", lambda call: 0)
    return None if ended.calls else f"the kernel refuses seccomp's user notification: {ended.said.strip()[-200:]}"


def run(
    work: Callable[[], Any], folder: str | os.PathLike[str] = "/", errors: Errors | None = None, seconds: float = 60.0
) -> Ended:
    """Call ``work`` in a forked process whose calls on files below ``folder`` end as ``errors`` says.

    Args:
        work: a function without arguments; its result is the exit code.
        folder: of the supervised files.
        errors: of their calls; None: they are not supervised, which is faster.
        seconds: that it may take.

    Raises:
        AssertionError: if it, or a process that it has started, has not ended in time; with its stacks.
    """
    [ended] = run_together([(work, errors)], folder, seconds)
    return ended


def import_for(work: Callable[[], Any]) -> None:
    """Import the modules that ``work`` imports, so that forked processes do not."""

    def print_modules() -> None:
        before = set(sys.modules)
        work()
        print("\nmodules:", *(name for name in sys.modules if name not in before))

    for name in run(print_modules).said.rpartition("modules:")[2].split():
        with suppress(Exception):  # some are no modules of their own
            import_module(name)


def run_together(
    works: Sequence[tuple[Callable[[], Any], Errors | None]], folder: str | os.PathLike[str], seconds: float = 60.0
) -> list[Ended]:
    """As :func:`run`, of several processes at once; calls of those without ``errors`` are not looked at."""
    processes = [_Process(work, os.path.realpath(folder), errors) for work, errors in works]
    try:
        _supervise(processes, seconds)
    finally:
        for process in processes:
            process.close()
    return [process.ended for process in processes]


def _supervise(processes: list[_Process], seconds: float) -> None:
    poll, by_descriptor = select.poll(), {}
    for process in processes:
        for descriptor in process.descriptors:
            poll.register(descriptor, select.POLLIN)
            by_descriptor[descriptor] = process
    limit, aborted = time.monotonic() + seconds, False
    while by_descriptor:
        for descriptor, events in poll.poll(1000):
            if not by_descriptor[descriptor].serve(descriptor, events):
                poll.unregister(descriptor)
                del by_descriptor[descriptor]
        if time.monotonic() > limit:
            assert not aborted, "\n".join(f"did not end:\n{each.read_output()}" for each in by_descriptor.values())
            for process in by_descriptor.values():
                process.kill(signal.SIGABRT)  # they print their stacks
            limit, aborted = limit + 5.0, True
    said = "\n".join(process.ended.said for process in processes)
    assert not aborted, f"had not ended within {seconds:g} s:\n{said}"


class _Process:
    """One forked process.

    Args:
        work: what it does.
        folder: whose files are meant.
        errors: of its calls; None: they are not looked at.
    """

    def __init__(self, work: Callable[[], Any], folder: str, errors: Errors | None) -> None:
        self.ended = Ended()
        self._folder, self._errors = folder, errors
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._pid = os.fork()
            if self._pid == 0:
                _be_child(work, self._output.fileno(), theirs, errors is not None)
            theirs.close()
            self._pidfd = os.pidfd_open(self._pid)
            received = socket.recv_fds(ours, 1, 1)[1] if errors is not None else []
        self._listener = received[0] if received else None
        self._memory = os.open(f"/proc/{self._pid}/mem", os.O_RDONLY) if received else None
        self.descriptors = [self._pidfd, *received]

    def serve(self, descriptor: int, events: int) -> bool:
        """Heed what was heard from a descriptor; returns whether more may come from it."""
        if descriptor == self._pidfd:
            _, status = os.waitpid(self._pid, 0)
            self.ended.code = os.waitstatus_to_exitcode(status)
            self.ended.said = self.read_output()
            return False
        if not events & select.POLLIN:
            return False  # no process or thread is left
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(descriptor, _RECEIVE, notice)
            number, thread, _, call, _, _, *arguments = _NOTICE.unpack(notice)
            error = self._error_of(thread, call, arguments)
            fcntl.ioctl(descriptor, _SEND, _ANSWER.pack(number, 0, -error, 0 if error else _CONTINUE))
        except OSError as gone:
            if gone.errno not in (errno.ENOENT, errno.ESRCH, errno.EIO):
                raise
        return True

    def _error_of(self, thread: int, number: int, arguments: list[int]) -> int:
        assert self._errors is not None
        name, *operands = _calls()[number]
        paths = [self._path(thread, operand, arguments) for operand in operands]
        concerned = [path for path in paths if path == self._folder or path.startswith(f"{self._folder.rstrip('/')}/")]
        if not concerned:
            return 0
        creates = bool(arguments[_OPEN_FLAGS[name]] & os.O_CREAT) if name in _OPEN_FLAGS else False
        call = SystemCall(name, tuple(concerned), creates or _ALLOCATING.fullmatch(name) is not None)
        self.ended.calls.append(call)
        error = self._errors(call)
        if error:
            self.ended.failed.append(call)
        return error

    def _path(self, thread: int, operand: str, arguments: list[int]) -> str:
        """The file that an argument names; an empty text for what is none."""
        kind, place = operand[0], int(operand[1:])
        if kind == "f":
            return _of_descriptor(thread, arguments[place])
        path = self._text(arguments[place])
        if path.startswith("/"):
            return os.path.normpath(path)
        folder = _of_descriptor(thread, arguments[place - 1] if kind == "d" else _NOTHING)
        return os.path.normpath(os.path.join(folder, path)) if path else folder

    def _text(self, address: int) -> str:
        assert self._memory is not None
        try:
            return os.fsdecode(os.pread(self._memory, _LONGEST_PATH, address).partition(b"\0")[0]) if address else ""
        except OSError:  # an address that is no memory: the kernel will say so
            return ""

    def kill(self, number: int) -> None:
        """Send a signal, if it lives."""
        signal.pidfd_send_signal(self._pidfd, number)

    def read_output(self) -> str:
        """Return what it has printed so far."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def close(self) -> None:
        """End the process, if it lives."""
        try:
            self.kill(signal.SIGKILL)
            os.waitpid(self._pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        for descriptor in (self._pidfd, self._listener, self._memory):
            if descriptor is not None:
                os.close(descriptor)
        self._output.close()


def _of_descriptor(thread: int, descriptor: int) -> str:
    descriptor = ctypes.c_int(descriptor).value
    try:
        return os.readlink(f"/proc/{thread}/{'cwd' if descriptor == _NOTHING else f'fd/{descriptor}'}")
    except OSError:  # it is not open
        return ""


@cache
def _calls() -> dict[int, list[str]]:
    """Name and operands of the calls that are looked at, by their numbers on this machine."""
    column = 1 + list(_AUDIT).index(platform.machine())
    rows = [row.split() for row in _TABLE.split(";")]
    return {int(row[column]): [row[0], *row[3:]] for row in rows if int(row[column]) >= 0}


def _be_child(work: Callable[[], Any], output: int, link: socket.socket, supervised: bool) -> None:
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # whatever earlier tests of this process have left
        _speak_to(output)
        if supervised:
            listener = _install()
            socket.send_fds(link, [b"."], [listener])
            os.close(listener)  # held by the other side alone: with it gone no call waits for an answer
        link.close()
        result = work()
        code = result if isinstance(result, int) else 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _speak_to(output: int) -> None:
    """Send both streams and all warnings to a file, whatever this process has done with them before."""
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False, errors="replace")  # type: ignore[misc]  # noqa: SIM115
    faulthandler.enable(file=2)
    warnings.simplefilter("always")
    warnings.showwarning = lambda text, kind, *_, **__: print(f"{kind.__name__}: {text}", file=sys.stderr)


def _install() -> int:
    """Filter the calls of this process; returns the descriptor by which they are supervised."""
    machine, numbers = platform.machine(), sorted(_calls())
    load, equal, give = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
    steps = [(load, 0, 0, 4), (equal, 0, len(numbers) + 1, _AUDIT[machine]), (load, 0, 0, 0)]
    steps += [(equal, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    steps += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x7FC00000)]  # SECCOMP_RET_ALLOW, SECCOMP_RET_USER_NOTIF
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    # SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_NEW_LISTENER
    listener = int(libc.syscall(ctypes.c_long(_SECCOMP[machine]), 1, ctypes.c_ulong(1 << 3), program))
    if listener < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return listener
