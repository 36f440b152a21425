"""A pool of ranks for tests: processes forked from one server that has imported torch and Lightning.

The server never starts a thread, since a fork of a process with threads can deadlock. Ranks are forked on demand and
reused by one case after another:

    def case(scale):                      # at the top level of a module, so that a rank can import it
        tensor = torch.ones(1) * scale
        dist.all_reduce(tensor)
        return tensor.item()

    pool.run(case, 4, 2.0)                # [8.0, 8.0, 8.0, 8.0], one result per rank

Each case gets a new default process group (gloo), seeds, environment and working folder, and its global state is reset
afterwards. A case that raises fails with the traceback of every rank; a case that hangs fails with the Python stack of
every rank, and the pool starts new ranks.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import gc
import multiprocessing.forkserver
import os
import pickle
import pkgutil
import random
import re
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
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from trainwright.launch.ranks.rendezvous import LocalStore

SEED = 1234
# Seconds that the other ranks of a case have to end after the first has failed.
GRACE_SECONDS = 5.0
# Characters of a rank's output that a failure shows, from the end.
OUTPUT_LIMIT = 6000

# A rank with more threads between two cases has leaked process groups, whose threads poll; it is replaced.
MOST_THREADS = 8

# Allocations between two collections of garbage; Python's 700 take a twentieth of the time of all tests.
ALLOCATIONS = 20_000

ROOT = Path(__file__).parents[1]

# Signals with which native code crashes.
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
        """Return whether native code crashed in a rank."""
        return any(text == f"was ended by {name}" for text in self.tracebacks.values() for name in CRASHES)


class RankCrash(UserWarning):
    """Native code crashed in a rank; the case is repeated."""


class RankTimeout(AssertionError):
    """A case did not end in time; the message holds the Python stack of each rank that still ran."""


@dataclass(frozen=True)
class Last:
    """A result that ends the case, since the other ranks may wait for this one forever.

    Attributes:
        value: the result.
        seconds: time for the others to end; the result of one that does not is ``None``.
    """

    value: Any
    seconds: float = 1.0


@dataclass(frozen=True)
class Case:
    """A function call on one rank.

    Attributes:
        module, name: of the function, which the rank imports.
        args, kwargs: its arguments.
        rank, world_size: of this rank.
        store: port of the pool's store, and a prefix of keys. (A file store would poll every ten milliseconds.)
        port: a free port, for a case that makes its own process group.
        folder: working folder.
        environment: the parent's environment.
        init_group: whether to make the default process group (gloo) first.
        timeout: seconds, also of the process group.
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
        """Return the variables that torch elastic sets for a rank; with them Lightning starts no process itself."""
        return {
            # Of seed_everything in an earlier test; Lightning would seed ranks with them.
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


# ---- In a rank ------------------------------------------------------------------------------------------------------


def _serve(connection: Connection, output: Descriptor) -> None:
    """Run cases until the parent closes the connection, then exit."""
    _redirect_output(output.number)
    _die_with_parent()
    # The inherited start method would start a server in every rank.
    multiprocessing.set_start_method("fork", force=True)
    # Ctrl-C belongs to the parent, which ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            case = pickle.loads(connection.recv_bytes())
        except EOFError:
            # Interpreter shutdown sometimes aborts because of gloo's threads.
            os._exit(0)
        connection.send_bytes(pickle.dumps(_run_case(case)))


def _redirect_output(descriptor: int) -> None:
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    # Unbuffered lines: the parent reads the file while this process still runs, or after it was killed.
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


def _print_stacks() -> None:
    """Print stacks on abort and on SIGUSR1; before every case, since the end of a ``Trainer`` resets the handlers."""
    faulthandler.disable()
    faulthandler.enable(file=2)
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the server ends."""
    # The server ends when the last process with this descriptor does, which must not be a rank.
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _run_case(case: Case) -> tuple[str, Any, float]:
    """Return ``("result", pickled result, time)`` or ``("error", traceback, time)``; processes share the clock."""
    ended = 0.0
    _print_stacks()
    try:
        with _clean_process(case), warnings.catch_warnings():
            try:
                result = pickle.dumps(pkgutil.resolve_name(f"{case.module}:{case.name}")(*case.args, **case.kwargs))
            finally:
                # Before cleaning up, which closes connections, so that other ranks fail later.
                ended = time.monotonic()
        end_left_processes(os.getpid())
        return "result", result, ended
    except BaseException:  # SystemExit too
        return "error", traceback.format_exc(), ended


@contextmanager
def _clean_process(case: Case) -> Iterator[None]:
    """Set up the process state of a case, and reset it afterwards."""
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
        # Else a case without collectives could close its connections before another rank has made its own.
        dist.barrier()
    try:
        yield
    finally:
        # Collect before the group goes: DDP's reducer and work handles that outlive it abort the process.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        # Names of groups contain this count; a default group that could not be made leaves it too high.
        dist.distributed_c10d._world.group_count = 0
        gc.collect()
        clear_mesh_caches()
        _restore_torch()
        os.chdir("/")
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        # What is left belongs to modules: the next case's collections need not walk it.
        gc.freeze()


def end_left_processes(parent: int, known: frozenset[int] = frozenset()) -> None:
    """Fail if ``parent`` has children other than ``known`` that do not end within seconds; kill them.

    Raises:
        AssertionError: with the command of each.
    """
    _end(lambda: _children(parent) - known, "process(es) running")


def end_marked_processes(mark: str, known: frozenset[int], before: frozenset[int] = frozenset()) -> None:
    """Fail if a process whose environment holds ``mark`` outlives its parents, and kill it.

    The caller, its children and the ranks of the pool (children of ``known``) do not count.

    Args:
        mark: ``NAME=value``, inherited by every process that tests start.
        known: the servers of the pool.
        before: processes from before the test, whose environment need not be read.

    Raises:
        AssertionError: with the command of each.
    """
    own = {os.getpid(), *known, *before, *(child for server in known for child in _children(server))}
    _end(lambda: _marked(mark.encode(), all_processes() - own), "process(es) running that lost their parent")


def _end(find: Callable[[], set[int]], said: str) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while left := {process: _read(process, "cmdline").replace("\0", " ").strip() for process in find()}:
        if time.monotonic() > deadline:
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            raise AssertionError(f"left {len(left)} {said}: {left}")
        time.sleep(0.02)


def all_processes() -> frozenset[int]:
    """Return all process ids of this machine."""
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdecimal())


def _marked(mark: bytes, processes: frozenset[int]) -> set[int]:
    found: set[int] = set()
    for process in processes:
        with suppress(OSError):  # another user's, or one that ended meanwhile
            if mark in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                found.add(process)
    return _running(found)


def _children(parent: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended meanwhile
            found.update(int(child) for child in task.read_text().split())
    return _running(found)


def _running(processes: set[int]) -> set[int]:
    """Return processes that have not ended."""
    states = {process: _read(process, "stat").rpartition(")")[2].split()[:1] for process in processes}
    return {process for process, state in states.items() if state not in (["Z"], ["X"], [])}


def _read(process: int, file: str) -> str:
    try:
        return Path(f"/proc/{process}/{file}").read_text()
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
        torch.compiler.set_stance("default")


# ---- In the parent --------------------------------------------------------------------------------------------------


class Descriptor:
    """An open file of the parent, pickled as a descriptor that is valid in the started process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.number),)


def _received(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


class _Rank:
    """A forked process, the pipe to it, and an unnamed file for its output."""

    def __init__(self) -> None:
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        descriptor = self.output.fileno()
        # Appending makes the parent's truncation between cases safe, since both share the offset.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        self.connection, theirs = context.Pipe()
        # Not a daemon: those may not have the worker processes of a DataLoader.
        self.process = context.Process(target=_serve, args=(theirs, Descriptor(descriptor)), daemon=False)
        # A process starts in its parent's folder, and a test's is removed at its end.
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
        # What a crash prints after its stack is as long as what is kept.
        text = re.sub("^Extension modules: .*", "", self.output.read().decode(errors="replace"), flags=re.M).strip()
        return text if len(text) <= OUTPUT_LIMIT else f"[...]\n{text[-OUTPUT_LIMIT:]}"

    @property
    def num_threads(self) -> int:
        """Current number of threads of the process."""
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
    """Runs cases on ranks; see the module's docstring."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._store: LocalStore | None = None
        self._cases = 0
        atexit.register(self.close)

    @staticmethod
    def warm() -> None:
        """Start the server, whose imports then overlap with what the caller does next."""
        context.set_forkserver_preload(["tests.preload"])
        with chdir(ROOT):  # on its import path; a test runs in another folder
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

        A case in which native code crashed (see :data:`CRASHES`) is repeated once on new processes, with a warning:
        about one of two thousand cases crashes in gloo's threads.

        Args:
            function: a function at the top level of a module.
            world_size: number of ranks.
            timeout: seconds the case may take.
            init_group: whether the default process group (gloo) is made first.

        Returns:
            The result of each rank.

        Raises:
            RankError: if a rank raised or died.
            RankTimeout: if a rank was still running after ``timeout``.
        """
        if "<" in function.__qualname__:
            raise ValueError(
                f"{function.__qualname__} must be defined at the top level of a module, so that ranks can import it."
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
            if clean:
                self._replace_burdened()
            return results
        finally:
            if not clean:
                # After any failure or interrupt, ranks may be in the middle of a collective.
                self.close(kill=True)

    def _meet(self) -> tuple[int, str]:
        """Return the port of the store, and a prefix of keys that no other case has."""
        from trainwright.launch.ranks.rendezvous import LocalStore

        if self._store is None:
            self._store = LocalStore()
        self._cases += 1
        return self._store.port, f"case_{self._cases}"

    def _replace_burdened(self) -> None:
        """Replace ranks that leaked threads; a fork costs less than these."""
        for index, rank in enumerate(self._ranks):
            if rank.num_threads > MOST_THREADS:
                rank.end(kill=True)
                self._ranks[index] = _Rank()

    def _collect(self, world_size: int, timeout: float) -> tuple[list[Any], bool]:
        """Return results by rank, and whether all ranks are ready for another case."""
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
                # The others may wait for it forever.
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
        # The innermost frames come first, since a long message may be cut.
        doing = [f"--- rank {rank} is at\n{_main_stack(text)}" for rank, text in printed.items()]
        return "\n\n".join([*doing, *(f"--- rank {rank}\n{text}" for rank, text in printed.items())])

    def close(self, kill: bool = False) -> None:
        """End all ranks; the next case forks new ones."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.end(kill)
        if self._store is not None:
            self._store.close()
            self._store = None


def _main_stack(printed: str) -> str:
    """Return the innermost frames of the main thread, from a text that ends with its stack."""
    return "\n".join(printed.rpartition("Current thread")[2].splitlines()[1:13])


def free_port() -> int:
    """Return an unused port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
