"""Ranks that hang, watched by a monitor in the test's process; each is a process of its own that may be killed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
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
from trainwright.launch.watchdog.boxes import HangLimits
from trainwright.launch.watchdog.callback import Watchdog
from trainwright.launch.watchdog.monitor import DiagnosedHang, HangMonitor
from trainwright.strategies.contract.registry import make_strategy
from trainwright.trainer.trainer import Trainer

# Limits so small that a test ends soon, and large enough for a machine that has other things to do.
LIMITS = HangLimits(floor_seconds=2.0, first_timeout=120.0)
# Limits so large that what is found within the time of a test was not found by them.
NO_LIMITS = HangLimits(floor_seconds=600.0, first_timeout=1800.0)
HANGS_AT = 5  # after the steps of which nothing is learned
FOREVER = 1000.0
LONGEST = 120.0  # seconds until a hang is found or the ranks end
_context = multiprocessing.get_context("forkserver")


class Ranks:
    """Ranks that run ``case(*args)`` in a folder of their own, and their monitor; killed at the end of the block.

    Args:
        case: a function at the top level of a module.
        args: of the case.
        folder: their working folder, which has the reports of hangs; made if it is not there.
        world_size: number of ranks.
        limits: of the monitor; None = the ranks watch themselves, as in a script under any launcher.
    """

    def __init__(
        self, case: Callable[..., Any], args: tuple[Any, ...], folder: Path, world_size: int, limits: HangLimits | None
    ) -> None:
        self.folder = folder
        (folder / "boxes").mkdir(parents=True, exist_ok=True)
        self._watches = limits is not None
        self.monitor = HangMonitor(world_size, folder / "boxes", folder, limits)
        RankPool.warm()
        port = free_port()
        self.processes = []
        for rank in range(world_size):
            watched = {} if limits is None else self.monitor.environment(rank)
            environment = {**os.environ, **_of_rank(rank, world_size, port), **watched}
            process = _context.Process(
                target=_run, args=(environment, str(self._output(rank)), str(folder), case, args)
            )
            process.start()
            self.processes.append(process)
            if watched:
                self.monitor.watch(rank, process.pid or 0)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            kill_with_workers(process.pid or 0)
        for process in self.processes:
            process.join(10.0)
        self.monitor.close()

    def _output(self, rank: int) -> Path:
        return self.folder / f"printed_{rank}"

    def printed(self, rank: int) -> str:
        return self._output(rank).read_text(errors="replace")[-4000:]

    def wait(self) -> DiagnosedHang | None:
        """Wait for a hang, or for the end of all ranks.

        Raises:
            AssertionError: if neither comes in time.
        """
        end = time.monotonic() + LONGEST
        while time.monotonic() < end:
            found = self.monitor.check() if self._watches else None
            if found is not None or None not in self.exit_codes():
                return found
            time.sleep(0.05)
        raise AssertionError(f"neither a hang nor an end within {LONGEST:g} s; rank 0 printed:\n{self.printed(0)}")

    def exit_codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]


def _of_rank(rank: int, world_size: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
    return {name: str(value) for name, value in {**own, **met}.items()}


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


def make_faulty(module: Any, fault: Callable[[], None]) -> Any:
    """Let rank 1 do something wrong within the user's own step."""
    original = type(module).training_step

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
    fit(strategy, options, make_faulty(module, FAULTS[fault]), DataLoader(data, batch_size=4))


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


class GroupCalls(Callback):
    """Every rank sums over a group of its own after each step; rank 1 leaves out one call."""

    def on_train_start(self, *_: Any) -> None:
        self.group = dist.new_group([0, 1], group_desc="metrics")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not (is_culprit() and trainer.global_step == HANGS_AT):
            dist.all_reduce(torch.ones(5), group=self.group)


def left_out_of_another_group() -> None:
    """Rank 1 leaves out a call of one group and waits in the next one of another."""
    fit("ddp", {}, make_module("decoder-sgd"), callbacks=(GroupCalls(),))


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
