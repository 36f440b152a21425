"""Loader workers outlive the signals that end a run."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainwright.trainer.data.data_connector import ShieldedWorker, shield_workers
from trainwright.trainer.data.wrapped_loader import WrappedLoader


class Told(Dataset[int]):
    """The worker gets each of the signals from another process while it reads a sample."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        assert get_worker_info() is not None
        os.kill(os.getpid(), (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)[index])
        time.sleep(0.05)
        return os.getpid()


class Starts(Dataset[int]):
    """The worker starts and terminates a program, as video decoders do."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        return program.wait(timeout=10)


def own_init(worker_id: int) -> None:
    Path(f"init_{worker_id}").touch()


def make(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, num_workers=1, batch_size=None, multiprocessing_context="fork", **options)


def test_worker_ignores_signals() -> None:
    loader = make(Told())
    shield_workers(loader)
    [worker] = set(loader)
    assert not Path(f"/proc/{worker}").exists()  # it ends with its loader


def test_rank_terminates_worker() -> None:
    loader = make(Told(), persistent_workers=True)
    shield_workers(loader)
    worker = next(iter(loader))
    [process] = loader._iterator._workers  # type: ignore[union-attr]
    assert process.pid == worker
    process.terminate()
    process.join(10)
    assert process.exitcode == 0


def test_worker_outlives_starting_thread() -> None:
    loader = make(Told(), persistent_workers=True)
    shield_workers(loader)
    workers: list[int] = []
    thread = threading.Thread(target=lambda: workers.extend(loader))
    thread.start()
    thread.join()
    assert len(set(workers)) == 1
    assert list(loader) == workers


def test_child_programs_can_be_terminated() -> None:
    loader = make(Starts())
    shield_workers(loader)
    assert list(loader) == [-signal.SIGTERM]


def test_user_worker_init_fn_runs() -> None:
    loader = make(Starts(), worker_init_fn=own_init)
    for _ in range(2):
        shield_workers(WrappedLoader(loader))
    assert isinstance(loader.worker_init_fn, ShieldedWorker)
    assert loader.worker_init_fn.init is own_init
    assert list(loader) == [-signal.SIGTERM]
    assert Path("init_0").exists()


def test_no_workers() -> None:
    loader = DataLoader(Told())
    shield_workers(loader)
    shield_workers([1, 2])
    assert loader.worker_init_fn is None
