"""Ranks that hang, watched by a monitor in the test's process; each is a process of its own, which may be killed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset

from tests.parity import layout_modules
from tests.parity.harness import QUIET
from tests.parity.layouts import Texts
from tests.parity.modules import Tokens, make_module
from tests.pool import RankPool, free_port
from trainwright.core.processes.process import kill_with_workers
from trainwright.launch.watchdog.callback import Watchdog
from trainwright.launch.watchdog.limits import HangLimits
from trainwright.launch.watchdog.monitor import DiagnosedHang, HangMonitor
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.trainer import Trainer

# Limits so small that a test ends soon, and large enough for a machine that has other things to do.
LIMITS = HangLimits(floor_seconds=1.5, first_timeout=120.0)
# Limits so large that what is found within the time of a test was not found by them.
NO_LIMITS = HangLimits(floor_seconds=600.0, first_timeout=1800.0)
HANGS_AT = 5  # after the steps of which nothing is learned
FOREVER = 1000.0
_context = multiprocessing.get_context("forkserver")


@contextmanager
def watched_ranks(
    case: Callable[..., Any], world_size: int, *args: Any, limits: HangLimits | None = LIMITS
) -> Iterator[Ranks]:
    """Ranks that run ``case(*args)``, and their monitor; those that are left are killed at the end.

    Args:
        case: what each rank does, a function at the top level of a module.
        world_size: number of ranks.
        args: of the case.
        limits: of the monitor; None = the ranks look after themselves, as in a script under any launcher.
    """
    ranks = Ranks(case, world_size, args, limits)
    try:
        yield ranks
    finally:
        ranks.end()


class Ranks:
    def __init__(
        self, case: Callable[..., Any], world_size: int, args: tuple[Any, ...], limits: HangLimits | None
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=os.getcwd()))
        self.monitor = HangMonitor(world_size, self.folder, Path(os.getcwd()), limits)
        RankPool.warm()
        port = free_port()
        self.processes = []
        for rank in range(world_size):
            watched = {} if limits is None else self.monitor.environment(rank)
            environment = {**os.environ, **_of_rank(rank, world_size, port), **watched}
            printed = self.folder / f"printed_{rank}"
            process = _context.Process(target=_run, args=(environment, str(printed), os.getcwd(), case, args))
            process.start()
            self.processes.append(process)
            if watched:
                self.monitor.watch(rank, process.pid or 0)

    def hang(self, seconds: float = 120.0) -> DiagnosedHang:
        """The hang that the monitor finds; fails when it finds none in time, or a rank ends."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.monitor.check()
            if found is not None:
                return found
            ended = [rank for rank, process in enumerate(self.processes) if process.exitcode not in (None, 0)]
            assert not ended, f"rank {ended[0]} ended instead of hanging:\n{self.printed(ended[0])}"
            time.sleep(0.1)
        raise AssertionError(f"no hang was found within {seconds:g} s; rank 0 printed:\n{self.printed(0)}")

    def come_to_the_end(self, seconds: float = 120.0) -> None:
        """Wait for the ranks to end; fails when the monitor finds a hang, or they do not end well in time."""
        end = time.monotonic() + seconds
        while any(process.exitcode is None for process in self.processes):
            found = self.monitor.check()
            assert found is None, found.report
            assert time.monotonic() < end, f"the ranks still run after {seconds:g} s"
            time.sleep(0.1)
        assert [process.exitcode for process in self.processes] == [0] * len(self.processes), self.printed(0)

    def explanation(self, seconds: float = 120.0) -> str:
        """Return the explanation of a failure once all ranks have ended."""
        for rank in range(len(self.processes)):
            self.first_exit_code(rank, seconds)
        explanation = self.monitor.explain()
        assert explanation is not None, self.printed(0)
        return explanation

    def first_exit_code(self, rank: int, seconds: float = 120.0) -> int:
        """Wait for a rank to end; how it did."""
        self.processes[rank].join(seconds)
        code = self.processes[rank].exitcode
        assert code is not None, f"rank {rank} still runs after {seconds:g} s:\n{self.printed(rank)}"
        return code

    def printed(self, rank: int) -> str:
        return (self.folder / f"printed_{rank}").read_text(errors="replace")[-4000:]

    def end(self) -> None:
        for process in self.processes:
            kill_with_workers(process.pid or 0)
        for process in self.processes:
            process.join(10.0)
        self.monitor.close()


def _of_rank(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
    }


def _run(environment: dict[str, str], printed: str, folder: str, case: Callable[..., Any], args: Any) -> None:
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # The workers of a data loader fork, as they do in a process that was not forked itself.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case(*args)
    os._exit(0)


# ---- what a rank does wrong ------------------------------------------------------------------------------------------


def is_culprit() -> bool:
    return os.environ["RANK"] == "1"  # within a step dist.get_rank() is that of the data rank


def stop_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # THE LINE


def hold_the_gil() -> None:
    # Counted in compiled code, which neither lets go of the lock nor looks for signals.
    sum(itertools.repeat(0))


def sleep_on() -> None:
    time.sleep(FOREVER)


def nothing() -> None:
    pass


FAULTS = {fault.__name__: fault for fault in (stop_by_signal, wait_for_a_lock, hold_the_gil, sleep_on, nothing)}


class FaultyHook(Callback):
    """Rank 1 does something wrong in a hook at one step."""

    def __init__(self, fault: str) -> None:
        self.fault = FAULTS[fault]

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if is_culprit() and trainer.global_step == HANGS_AT:
            self.fault()


class FaultyModule:
    """Makes rank 1 do something wrong within the user's own step."""

    def __init__(self, fault: Callable[[], None]) -> None:
        self.fault = fault

    def __call__(self, module: Any) -> Any:
        fault, original = self.fault, type(module).training_step

        class Faulty(type(module)):  # type: ignore[misc]
            def training_step(self, *args: Any) -> Any:
                if is_culprit() and self.trainer.global_step == HANGS_AT:
                    fault()
                return original(self, *args)

        module.__class__ = Faulty
        return module


def fit(
    strategy: str,
    options: dict[str, Any],
    module: Any,
    data: Any = None,
    callbacks: tuple[Any, ...] = (),
    limits: HangLimits = LIMITS,
) -> None:
    trainer = Trainer(
        strategy=make_strategy(strategy, certificate="off", **options),
        devices=int(os.environ["WORLD_SIZE"]),
        **QUIET,
        max_steps=20,
        max_epochs=-1,
        callbacks=[Watchdog(floor_seconds=limits.floor_seconds, first_timeout=limits.first_timeout), *callbacks],
    )
    trainer.fit(module, DataLoader(Tokens(), batch_size=4) if data is None else data)


def in_training_step(fault: str, strategy: str, options: dict[str, Any]) -> None:
    data: Dataset[Any]
    if strategy in ("pipeline", "hybrid"):
        module, data = layout_modules.make_module("gpt"), Texts(48)
    else:
        module, data = make_module("decoder-sgd"), Tokens()
    fit(strategy, options, FaultyModule(FAULTS[fault])(module), DataLoader(data, batch_size=4))


def in_hook(fault: str, limits: HangLimits = LIMITS) -> None:
    fit("ddp", {}, make_module("decoder-sgd"), callbacks=(FaultyHook(fault),), limits=limits)


# ---- data ------------------------------------------------------------------------------------------------------------


class BlockingTokens(Tokens):
    """Rank 1 never gets one of the later samples."""

    def __getitem__(self, index: int) -> Any:
        if is_culprit() and index >= 30:
            time.sleep(FOREVER)
        return super().__getitem__(index)


def with_blocking_data(workers: int) -> None:
    data: Dataset[Any] = BlockingTokens()
    fit("ddp", {}, make_module("decoder-sgd"), DataLoader(data, batch_size=2, num_workers=workers))


# ---- collective calls ------------------------------------------------------------------------------------------------


class OwnCalls(Callback):
    """Every rank sums something of its own after each step, but rank 1 does it otherwise at one."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        otherwise = is_culprit() and trainer.global_step == HANGS_AT
        getattr(self, self.how)(otherwise)

    def other_kind(self, otherwise: bool) -> None:
        if otherwise:
            dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3))
        else:
            dist.all_reduce(torch.ones(3))

    def other_size(self, otherwise: bool) -> None:
        dist.all_reduce(torch.ones(100 if otherwise else 7))

    def left_out(self, otherwise: bool) -> None:
        if not otherwise:
            dist.all_reduce(torch.ones(3))


def with_own_calls(how: str, strategy: str) -> None:
    fit(strategy, {}, make_module("decoder-sgd"), callbacks=(OwnCalls(how),))


def left_out_of_another_group() -> None:
    """Rank 1 leaves a call of one group out, and waits in the next one of another."""
    _with_group(_skip_and_go_on)


def _with_group(run: Callable[[dist.ProcessGroup], None]) -> None:
    trainer_group: list[dist.ProcessGroup] = []

    class Begin(Callback):
        def on_train_start(self, *_: Any) -> None:
            trainer_group.append(dist.new_group([0, 1], group_desc="metrics"))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if not (is_culprit() and trainer.global_step == HANGS_AT):
                run(trainer_group[0])

    fit("ddp", {}, make_module("decoder-sgd"), callbacks=(Begin(),))


def _skip_and_go_on(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(5), group=group)


# ---- no hang ---------------------------------------------------------------------------------------------------------


class SlowForAReason(Callback):
    """Rank 0 saves, which takes longer than anything before, and the others wait for it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_save_checkpoint(self, *_: Any) -> None:
        if dist.get_rank() == 0:
            time.sleep(self.seconds)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == HANGS_AT:
            trainer.save_checkpoint("saved.ckpt")


def saving_slowly(seconds: float) -> None:
    fit("ddp", {}, make_module("decoder-sgd"), callbacks=(SlowForAReason(seconds),))
