"""Runs with injected faults, in child processes if the fault ends the process."""

import faulthandler
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer, world_size
from tests.parity.layout_modules import make_module
from tests.parity.layouts import Texts

PATIENCE = 30.0  # timeout in seconds


class Steps(Callback):
    """Records ``(optimizer step, loss)`` of each micro-batch."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []
        self._step = 0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append((self._step, float(outputs["loss"])))


def fit(
    strategy: str,
    options: dict[str, Any],
    *callbacks: Callback,
    steps: int = 4,
    ckpt_path: str | None = None,
    data: Any = None,
    val_data: Any = None,
    network: str = "gpt",
    **trainer_options: Any,
) -> Any:
    """Train a small language model on all ranks; return the Trainer."""
    has_checkpoint = any(isinstance(each, Checkpoint) for each in callbacks)
    usual = {"global_batch_size": 8, "max_epochs": -1, "default_root_dir": "run", "max_steps": steps}
    usual |= {"callbacks": list(callbacks), "enable_checkpointing": has_checkpoint}
    trainer = make_trainer(strategy, options, **{**usual, **trainer_options})
    layout = getattr(trainer.strategy, "_open_layout", None)
    data_ranks = world_size() if layout is None else layout.resolve(world_size()).data_ranks
    loader = DataLoader(data or Texts(24), batch_size=(trainer.global_batch_size or 8) // data_ranks)
    val_loader = None if val_data is None else DataLoader(val_data, batch_size=2)
    trainer.fit(make_module(network), loader, val_loader, ckpt_path=ckpt_path)
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    """Return copies of this rank's parameters by name, without those of other stages."""
    held = {name: getattr(p, "_local_tensor", p) for name, p in trainer.lightning_module.named_parameters()}
    return {name: p.detach().clone() for name, p in held.items() if p.numel() and not p.is_meta}


class Child:
    """A forked process that runs ``work``, for a pool rank without a process group."""

    def __init__(self, work: Callable[[], Any], name: str = "child") -> None:
        self.stacks = Path(f"{name}.stacks").absolute()
        self.beats = Path(f"{name}.beats").absolute()
        self.error = Path(f"{name}.error").absolute()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                faulthandler.register(signal.SIGUSR1, file=self.stacks.open("a"), all_threads=False, chain=False)
                threading.Thread(target=self._beat, daemon=True).start()
                work()
                code = 0
            except SystemExit as error:
                code = int(error.code or 0)
            except BaseException:
                self.error.write_text(traceback.format_exc())
            finally:
                os._exit(code)

    def _beat(self) -> None:
        """Append to a file every 10 ms while Python threads run."""
        with self.beats.open("ab", buffering=0) as beats:
            while True:
                beats.write(b".")
                time.sleep(0.01)

    def num_beats(self) -> int:
        return self.beats.stat().st_size if self.beats.exists() else 0

    def stack(self) -> str:
        """Return the current Python stack of its main thread, or the first lines of it."""
        wait_until(self.beats.exists, "it has not begun")  # before that, the parent's handler would get the signal
        self.stacks.write_text("")
        wait_until(self._answers, "its stack was not written")
        return self.stacks.read_text()

    def _answers(self) -> bool:
        # Asked again and again: while Python's main thread still writes, a thread that is none of Python's may get the
        # signal, and has nothing to tell.
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.02)
        return "File" in self.stacks.read_text()

    def wait_within(self, function: str) -> str:
        """Return its stack as soon as ``function`` is on it."""
        stack = ""

        def is_there() -> bool:
            nonlocal stack
            stack = self.stack()
            return f"in {function}\n" in stack

        try:
            wait_until(is_there, f"it is not in {function}")
        except AssertionError as error:
            raise AssertionError(f"{error}, but here:\n{stack}{self._end()}") from None
        return stack

    def _end(self) -> str:
        """Return its wait status, or ``None`` if it is running."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        error = self.error.read_text() if self.error.exists() else ""
        return f"\nIt has ended ({os.waitstatus_to_exitcode(status)}). {error}" if pid else "\nIt lives."

    def wait(self) -> int:
        """Return its exit code, negative for a signal."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        self.kill()
        raise AssertionError(f"the process had not ended after {PATIENCE:g} s")

    def wait_stopped(self) -> None:
        """Wait until a signal stops it."""

        def is_stopped() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            assert not pid or os.WIFSTOPPED(status), f"it ended with {status}"
            return bool(pid)

        wait_until(is_stopped, "it did not stop")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def wait_until(is_so: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)


@contextmanager
def group_of(rank: int, world_size: int, port: int) -> Iterator[None]:
    """Make this process a rank of a new process group."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_PORT=str(port))
    place = {"rank": rank, "world_size": world_size, "init_method": f"tcp://127.0.0.1:{port}"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * PATIENCE), **place)
    yield


def firings(rank: int = 0) -> dict[str, int]:
    """Return how often each fault fired on a rank of the run in the working folder."""
    path = Path(f"run/faults/rank_{rank}.json")
    return {key: len(each) for key, each in json.loads(path.read_text()).items()} if path.exists() else {}


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8)
