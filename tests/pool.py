"""Ranks for tests: processes that fork from one warm server, live for the session, and run case after case.

Starting a process that imports torch and Lightning takes four seconds; forking one that already holds them takes
milliseconds. So one server process imports them once and never starts a thread (a fork of a process with threads can
deadlock), ranks fork from it on demand, and a case reuses the ranks of the case before it:

    def case(scale):                      # a function of a module, so a rank can import it
        tensor = torch.ones(1) * scale
        dist.all_reduce(tensor)
        return tensor.item()

    pool.run(case, 4, 2.0)                # [8.0, 8.0, 8.0, 8.0], one result per rank

Around every case a rank gets a fresh default process group (gloo), seeds, environment and working folder, and after it
everything a case may have left is undone. A case that raises fails with the traceback of every rank; a case that hangs
fails with the Python stack of every rank, and the pool starts over.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import gc
import multiprocessing.forkserver
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from trainwright.launch.ranks.local_store import LocalStore

SEED = 1234
# After the first rank of a case failed, the others have this long to fail or finish before they are ended (seconds).
GRACE_SECONDS = 5.0
# What a rank printed is shown in a failure from its end on, at most this much (characters).
OUTPUT_LIMIT = 6000

# Of a rank between two cases. One that has more holds on to process groups of earlier cases. Each of these has three
# threads that wake a hundred times a second: a dozen such ranks keep two cores busy with nothing.
MOST_THREADS = 8

ROOT = Path(__file__).parents[1]

# Signals by which native code ends a process.
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS")

context = multiprocessing.get_context("forkserver")


class RankError(AssertionError):
    """A case failed on at least one rank; the message holds every rank's traceback, the first to fail first.

    Attributes:
        tracebacks: rank -> the traceback it reported. Ranks that finished or were ended are absent.
    """

    def __init__(self, message: str, tracebacks: dict[int, str]) -> None:
        super().__init__(message)
        self.tracebacks = tracebacks

    @property
    def crashed(self) -> bool:
        """Whether native code ended a rank."""
        return any(text == f"was ended by {name}" for text in self.tracebacks.values() for name in CRASHES)


class RankCrash(UserWarning):
    """Native code crashed in a rank; the case is run once more."""


class RankTimeout(AssertionError):
    """A case did not end in time; the message holds the Python stack of every rank that was still running."""


@dataclass(frozen=True)
class Last:
    """A result that ends the case: the other ranks may wait for this one forever.

    Attributes:
        value: the result.
        seconds: how long the others have to end, too. One that does not is ended, and its result is ``None``.
    """

    value: Any
    seconds: float = 1.0


@dataclass(frozen=True)
class Case:
    """What one rank is told to run.

    Attributes:
        module, name: where the function is; a rank imports it.
        args, kwargs: what it is called with.
        rank, world_size: this rank's place.
        store: where the ranks of this case meet, port of the pool's store and a name: a file in its place is looked at
            every ten milliseconds by whoever waits, so that each process group would take as long.
        port: a port that was free when the case began, for a case that makes its own process group.
        folder: working folder of the case.
        environment: the parent's environment, so that what a test set is seen by its ranks.
        init_group: whether the default process group (gloo) is made before the function runs.
        timeout: seconds; also the timeout of the process group.
    """

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    store: tuple[int, str]
    port: int
    folder: str
    environment: dict[str, str]
    init_group: bool
    timeout: float

    def rank_environment(self) -> dict[str, str]:
        """The variables torch elastic gives a rank; Lightning reads them and starts no process itself."""
        return {
            # Lightning seeds a distributed rank anew by these, which seed_everything of an earlier test may have left.
            **{
                name: value for name, value in self.environment.items() if not name.startswith(("PL_GLOBAL", "PL_SEED"))
            },
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": "tests",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }


# ---------------------------------------------------------------------------------------------------------------------
# In a rank


def _serve(connection: Connection, output: Descriptor) -> None:
    """Run cases until the parent hangs up. The process never leaves this function alive."""
    _redirect_output(output.number)
    _die_with_parent()
    # multiprocessing hands its own start method down, which would start a server in every rank.
    multiprocessing.set_start_method("fork", force=True)
    # Ctrl-C belongs to the parent, which ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            case = pickle.loads(connection.recv_bytes())
        except EOFError:
            # Interpreter shutdown with gloo's threads around aborts now and then, after all work was done.
            os._exit(0)
        connection.send_bytes(pickle.dumps(_run_case(case)))


def _redirect_output(descriptor: int) -> None:
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    # Unbuffered lines: the parent reads the file while this process still runs, or after it was killed.
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


def _print_stacks() -> None:
    """Print stacks when the process is aborted, and on request.

    Before every case: the end of a ``Trainer`` puts back the handlers that Python knew of, which these are not.
    """
    faulthandler.disable()
    faulthandler.enable(file=2)
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the server ends, so a killed test run leaves no rank behind."""
    # The server ends when the last holder of this descriptor does; that must be the test process, not a rank.
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _run_case(case: Case) -> tuple[str, Any, float]:
    """``("result", pickled result, when)`` or ``("error", traceback, when)``; all processes share the clock."""
    ended = 0.0
    _print_stacks()
    try:
        with _clean_process(case), warnings.catch_warnings():
            try:
                result = pickle.dumps(_imported(case.module, case.name)(*case.args, **case.kwargs))
            finally:
                # Before the cleaning: that closes this rank's connections, and only then do the others fail too.
                ended = time.monotonic()
        end_left_processes(os.getpid())
        return "result", result, ended
    except BaseException:  # SystemExit too: a rank must answer whatever the case did
        return "error", traceback.format_exc(), ended


def _imported(module: str, name: str) -> Any:
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


@contextmanager
def _clean_process(case: Case) -> Iterator[None]:
    """Set up what a case may rely on, and undo what it may have left."""
    import numpy
    import torch
    import torch.distributed as dist

    from trainwright.strategies.contract.groups import clear_mesh_caches

    environment, handlers = dict(os.environ), {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR2)}
    os.environ.clear()
    os.environ.update(case.rank_environment())
    os.chdir(case.folder)
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    if case.init_group:
        (port, name), timeout = case.store, timedelta(seconds=case.timeout)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(name, store), rank=case.rank, world_size=case.world_size, timeout=timeout
        )
        del store
        # A case without collectives may end, and close its connections, before another rank has made all of its own.
        dist.barrier()
    try:
        yield
    finally:
        # Collect before the group goes: DDP's reducer and work handles that outlive it abort the process.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        # Which names the next groups get. Only the end of a default group puts it back: one that was never made, since
        # ranks did not meet, leaves it higher than it is on the ranks of the next case.
        dist.distributed_c10d._world.group_count = 0
        gc.collect()
        clear_mesh_caches()
        _restore_torch()
        os.chdir("/")
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end_left_processes(parent: int, known: frozenset[int] = frozenset()) -> None:
    """Fail if ``parent`` has children other than ``known`` that do not end by themselves within seconds; end them.

    Raises:
        AssertionError: with the command of each.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while left := {child: _command(child) for child in _children(parent) - known}:
        if time.monotonic() > deadline:
            for child in left:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            raise AssertionError(f"left {len(left)} process(es) running: {left}")
        time.sleep(0.02)


def end_marked_processes(mark: str, known: frozenset[int], before: frozenset[int] = frozenset()) -> None:
    """Fail if a process whose environment holds ``mark`` outlives its parents, and end it.

    The caller, its children and the ranks of the pool (children of ``known``) do not count.

    Args:
        mark: ``NAME=value``, as inherited by every process that the tests start.
        known: the servers behind the pool.
        before: processes that were there before the test: to read the environment of all takes long.

    Raises:
        AssertionError: with the command of each.
    """
    own = {os.getpid(), *known, *before, *(child for server in known for child in _children(server))}
    deadline = time.monotonic() + GRACE_SECONDS
    while left := {process: _command(process) for process in _marked(mark.encode(), all_processes() - own)}:
        if time.monotonic() > deadline:
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            raise AssertionError(f"left {len(left)} process(es) running that lost their parent: {left}")
        time.sleep(0.02)


def all_processes() -> frozenset[int]:
    """Process ids of this machine."""
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdecimal())


def _marked(mark: bytes, processes: frozenset[int]) -> set[int]:
    found: set[int] = set()
    for process in processes:
        with suppress(OSError):  # another user's, or one that ended meanwhile
            if mark in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                found.add(process)
    return {process for process in found if _state(process) not in ("Z", "X", "")}


def _children(parent: int) -> set[int]:
    """Living children; a child that ended is reaped by whoever holds its Popen or Process, and does not count."""
    found: set[int] = set()
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended meanwhile
            found.update(int(child) for child in task.read_text().split())
    return {child for child in found if _state(child) not in ("Z", "X", "")}


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def _restore_torch() -> None:
    import torch

    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


# ---------------------------------------------------------------------------------------------------------------------
# In the parent


class Descriptor:
    """An open file of the parent that arrives in a started process as a descriptor of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.number),)


def _received(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


class _Rank:
    """One forked process, the pipe to it and the file it prints into (which has no name, so it cannot be left)."""

    def __init__(self) -> None:
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        descriptor = self.output.fileno()
        # Both sides share the file's offset; appending makes the parent's truncation between cases safe.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        self.connection, theirs = context.Pipe()
        # Not a daemon, because multiprocessing forbids those the worker processes of a DataLoader.
        self.process = context.Process(target=_serve, args=(theirs, Descriptor(descriptor)), daemon=False)
        # A new process begins in the folder of the one that starts it: a test's, which is removed when the test ends.
        with chdir("/"):
            self.process.start()
        theirs.close()

    def begin(self, case: Case) -> None:
        self.output.truncate(0)
        self.connection.send_bytes(pickle.dumps(case))

    def reply(self) -> tuple[str, Any, float]:
        try:
            kind, value, ended = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE_SECONDS)
            return "died", _describe_exit(self.process.exitcode), 0.0
        return kind, pickle.loads(value) if kind == "result" else value, ended

    def printed(self) -> str:
        self.output.seek(0)
        text = self.output.read().decode(errors="replace").strip()
        return text if len(text) <= OUTPUT_LIMIT else f"[...]\n{text[-OUTPUT_LIMIT:]}"

    @property
    def num_threads(self) -> int:
        """Threads of the process now."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def dump_stacks(self) -> None:
        """Have the process print the Python stack of each of its threads."""
        with suppress(ProcessLookupError):
            os.kill(cast(int, self.process.pid), signal.SIGUSR1)

    def end(self, kill: bool) -> None:
        self.connection.close()
        if kill:
            self.process.kill()
        self.process.join(GRACE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()
        self.output.close()


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "hung up without ending"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code} in the middle of the case"


class RankPool:
    """Runs cases on ranks; see the module's text."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._store: LocalStore | None = None
        self._cases = 0
        atexit.register(self.close)

    @staticmethod
    def warm() -> None:
        """Start the server now, so that its imports overlap with whatever the caller does next."""
        context.set_forkserver_preload(["tests.preload"])
        with chdir(ROOT):  # where it finds what it imports; a test is in a folder of its own
            multiprocessing.forkserver.ensure_running()

    @property
    def processes(self) -> list[int]:
        """Process ids of the living ranks."""
        return [pid for rank in self._ranks if (pid := rank.process.pid) is not None]

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        init_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on ``world_size`` ranks at once.

        A case in which native code crashed (see :data:`CRASHES`) is run once more on new processes, with a warning
        that pytest shows: about one of two thousand cases crashes somewhere among gloo's threads, each time elsewhere.

        Args:
            function: a function at the top level of a module.
            world_size: number of ranks.
            timeout: seconds the case may take.
            init_group: whether each rank finds the default process group (gloo) already made.

        Returns:
            What each rank returned, by rank.

        Raises:
            RankError: if a rank raised or died.
            RankTimeout: if a rank was still running after ``timeout``.
        """
        if "<" in function.__qualname__:
            raise ValueError(
                f"{function.__qualname__} must stand at the top level of a module, so ranks can import it."
            )
        try:
            return self._run(function, world_size, args, kwargs, timeout, init_group)
        except RankError as error:
            if not error.crashed:
                raise
            warnings.warn(f"{function.__qualname__} is run once more:\n{error}", RankCrash, stacklevel=2)
        return self._run(function, world_size, args, kwargs, timeout, init_group)

    def _run(
        self,
        function: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        init_group: bool,
    ) -> list[Any]:
        self.warm()
        while len(self._ranks) < world_size:
            self._ranks.append(_Rank())
        store = self._meet() if init_group else (0, "")
        port = 0 if init_group else free_port()
        clean = False
        try:
            for rank in range(world_size):
                self._ranks[rank].begin(
                    Case(
                        module=function.__module__,
                        name=function.__qualname__,
                        args=args,
                        kwargs=kwargs,
                        rank=rank,
                        world_size=world_size,
                        store=store,
                        port=port,
                        folder=os.getcwd(),
                        environment=dict(os.environ),
                        init_group=init_group,
                        timeout=timeout,
                    )
                )
            results, clean = self._collect(world_size, timeout)
            if not clean:
                return results
            self._replace_burdened()
            return results
        finally:
            if not clean:
                # Whatever went wrong, an interrupt included, may have left ranks in the middle of a collective.
                self.close(kill=True)

    def _meet(self) -> tuple[int, str]:
        """Port of the store, and a name that no other case has there."""
        from trainwright.launch.ranks.local_store import LocalStore

        if self._store is None:
            self._store = LocalStore()
        self._cases += 1
        return self._store.port, f"case_{self._cases}"

    def _replace_burdened(self) -> None:
        """Exchange ranks in which earlier cases go on; a fork costs less than they do."""
        for index, rank in enumerate(self._ranks):
            if rank.num_threads > MOST_THREADS:
                rank.end(kill=True)
                self._ranks[index] = _Rank()

    def _collect(self, world_size: int, timeout: float) -> tuple[list[Any], bool]:
        """Results by rank, and whether all ranks are ready for another case."""
        waiting = {self._ranks[rank].connection: rank for rank in range(world_size)}
        results: dict[int, Any] = {}
        failures: dict[int, tuple[float, str]] = {}
        end, ended_by_result = time.monotonic() + timeout, False
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(cast(Connection, connection))
                kind, value, ended = self._ranks[rank].reply()
                if kind == "result":
                    if isinstance(value, Last):
                        ended_by_result, end = True, min(end, time.monotonic() + value.seconds)
                        value = value.value
                    results[rank] = value
                    continue
                failures[rank] = (ended, value)
                # The others may wait for this rank forever.
                end = min(end, time.monotonic() + GRACE_SECONDS)
        if waiting and (failures or not ended_by_result):
            self._dump(sorted(waiting.values()))
        if failures:
            first_to_last = sorted(failures, key=lambda rank: failures[rank][0])
            tracebacks = {rank: failures[rank][1] for rank in first_to_last}
            raise RankError(self._describe(tracebacks, sorted(waiting.values()), world_size), tracebacks)
        if waiting and not ended_by_result:
            stuck = sorted(waiting.values())
            raise RankTimeout(
                f"{len(stuck)} of {world_size} rank(s) still ran after {timeout:g} s. The end of what they printed, "
                f"with the stack of each thread:\n\n" + self._outputs(stuck)
            )
        return [results.get(rank) for rank in range(world_size)], not waiting

    def _dump(self, ranks: list[int]) -> None:
        for rank in ranks:
            self._ranks[rank].dump_stacks()
        time.sleep(0.5)  # the signal handlers print meanwhile

    def _describe(self, failures: dict[int, str], waiting: list[int], world_size: int) -> str:
        parts = [f"{len(failures)} of {world_size} rank(s) failed; the first is on top."]
        for rank, text in failures.items():
            parts.append(f"--- rank {rank}\n{text.rstrip()}")
            if printed := self._ranks[rank].printed():
                parts.append(f"--- rank {rank} printed\n{printed}")
        if waiting:
            parts.append("Still running then, and ended:\n" + self._outputs(waiting))
        return "\n\n".join(parts)

    def _outputs(self, ranks: list[int]) -> str:
        printed = {rank: self._ranks[rank].printed() for rank in ranks}
        # Of a long text only the beginning may be shown where tests run: what ranks are doing comes first.
        doing = [f"--- rank {rank} is here\n{_main_stack(text)}" for rank, text in printed.items()]
        return "\n\n".join([*doing, *(f"--- rank {rank}\n{text}" for rank, text in printed.items())])

    def close(self, kill: bool = False) -> None:
        """End every rank; the next case forks new ones."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.end(kill)
        if self._store is not None:
            self._store.close()
            self._store = None


def _main_stack(printed: str) -> str:
    """The innermost frames of the main thread, of a text that ends with its stack."""
    return "\n".join(printed.rpartition("Current thread")[2].splitlines()[1:13])


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
