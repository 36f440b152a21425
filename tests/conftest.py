"""Fixtures around every test: a time limit, an empty working folder, and checks for leaked processes and state."""

from __future__ import annotations

import os

# Before anything imports torch or numpy: a thread pool in the parent would make forking unsafe, and one thread per rank
# makes sums the same from run to run.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import pickle
import random
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.imported import forget_modules_of
from tests.installed import forget_strategies
from tests.pool import ALLOCATIONS, RankPool, all_processes, end_left_processes, end_marked_processes

# Inherited by every process that a test starts, so that a leaked one is found even when its parent is gone.
MARK = "TRAINWRIGHT_TEST_SESSION"
os.environ[MARK] = uuid.uuid4().hex

# A shell starts its background jobs with SIGINT ignored, which commands that a test interrupts would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Written by Lightning's seed_everything, which passes the seed on to workers so; by importing torch or scikit-learn; by
# pytest.
EXPECTED_VARIABLES = {
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",  # by importing scikit-learn
    "KMP_INIT_AT_FORK",
}


# Files and folders whose tests measure times. `make check` runs them after the others, one by one.
ALONE = (
    "benchmarks/test_balance.py",
    "callbacks/traffic/test_stragglers.py",
    "callbacks/progress/test_throughput.py",
    "tools/doctor/test_ranks.py",
    "launch/watchdog/test_watchdog.py",
    "launch/watchdog/test_stops.py",
)
# Files that take longest: started last, one would keep one process busy after all others are done.
FIRST = (
    "zoo/test_zoo.py", "faults/test_preemption.py", "parity/test_strategies.py", "parity/test_layouts.py",
    "planning/test_search.py", "launch/test_launch.py", "parity/test_precision.py", "parity/test_whole.py",
    "faults/test_restart.py", "command/test_auto.py", "parity/test_run_state.py", "benchmarks/test_resume.py",
    "parity/test_resume.py", "trainer/test_rollback.py", "faults/test_clean_ends.py", "launch/test_check_resume.py",
    "parity/test_hugging_face.py",
)  # fmt: skip
_TESTS = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import with Python's garbage collector off, and freeze the millions of objects that belong to modules."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(ALLOCATIONS)


@cache
def _is_alone(path: Path) -> bool:
    return not {_TESTS / name for name in ALONE}.isdisjoint((path, *path.parents))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the files that `make check` runs in its other part."""
    parts = {"not alone": False, "alone": True}
    wanted = parts.get(config.option.markexpr.removesuffix("and not thorough").strip())
    if wanted is None or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return True if _is_alone(collection_path) != wanted else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that run alone or are left out of samples, and start with the longest files."""
    for item in items:
        if _is_alone(item.path):
            item.add_marker("alone")
    mark_left_out(items)
    order = {_TESTS / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def mark_left_out(items: list[pytest.Item]) -> None:
    """Mark as `thorough` the cases that are not in the sample of a test with `sample(number)`."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, left in cases.items():
        random.Random(name).shuffle(left)
        values = {
            item: {(argument, repr(value)) for argument, value in item.callspec.params.items()}  # type: ignore[attr-defined]
            for item in left
        }
        seen: set[tuple[str, str]] = set()
        number: int = left[0].get_closest_marker("sample").args[0]  # type: ignore[union-attr]
        for _ in range(min(number, len(left))):  # fewer if single cases are named
            # The case with most values that no case so far has.
            drawn = max(left, key=lambda item: len(values[item] - seen))
            seen |= values[drawn]
            left.remove(drawn)
        for item in left:
            item.add_marker("thorough")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server of ranks before a test starts a thread."""
    if any("pool" in getattr(item, "fixturenames", ()) for item in session.items):
        RankPool.warm()
    import torch  # not at the top, since the process that distributes tests to others needs none

    # A call would start torch's thread pool, with which a fork of this process hangs.
    torch.set_num_threads = lambda threads: None


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Return the rank pool of this session."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(pool: RankPool) -> Callable[..., list[Any]]:
    """Return ``run(function, world_size, *args)``, which calls a function on ranks; see :mod:`tests.pool`."""
    return pool.run


@pytest.fixture(scope="session")
def reference(pool: RankPool) -> Callable[..., Any]:
    """Return ``run(function, *args)``, which calls a function on one rank and caches its result for the session."""
    known: dict[bytes, Any] = {}

    def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        key = pickle.dumps((function, args, options))
        if key not in known:
            (known[key],) = pool.run(function, 1, *args, **options)
        return known[key]

    return run


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_modules_left(tmp_path: Path) -> Iterator[None]:
    """Remove modules imported from a test's folder, since the next test may have others of the same names."""
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    forget_modules_of(tmp_path, modules)
    forget_strategies()


@pytest.fixture(autouse=True)
def _no_environment_left() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not changed - EXPECTED_VARIABLES, f"The test changed environment variables: {changed - EXPECTED_VARIABLES}"


@pytest.fixture(autouse=True)
def _signal_handlers_put_back() -> Iterator[None]:
    """Restore signal handlers that a command replaced."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    # A leaked watch would handle the next SIGTERM of any test, and end this process after its grace period.
    module = sys.modules.get("trainwright.core.processes.watch")
    watch = None if module is None else module.ShutdownWatch.of_process()
    if watch is not None:
        watch.stop()
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    assert watch is None, (
        "The test left a signal watch: a Trainer that was not torn down, or a command that did not end"
    )


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    yield
    # A test that did not import torch made no process group, and must not pay for the import.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("The test left a process group in the test process; run the case on the pool (fixture `ranks`).")


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before = all_processes()
    yield
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    tracker: Any = multiprocessing.resource_tracker._resource_tracker  # type: ignore[attr-defined]
    known = frozenset(pid for pid in (server._forkserver_pid, tracker._pid) if pid is not None)
    end_left_processes(os.getpid(), known)
    end_marked_processes(f"{MARK}={os.environ[MARK]}", known, before)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and not t.daemon and t.is_alive()]
    for thread in left:
        thread.join(2.0)
    left = [t for t in left if t.is_alive()]
    assert not left, f"The test left threads running: {left}"


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a user's configuration directory and module, on a machine without a GPU."""
    from tests.command.project import write_project
    from trainwright.core.processes import machine

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    return write_project(tmp_path)
