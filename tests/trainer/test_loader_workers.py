"""Worker processes of data loaders outlive the signals that tell a run to end."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainwright.trainer.data.data_connector import HeedsItsRank, spare_workers
from trainwright.trainer.data.wrapped_loader import WrappedLoader


class Told(Dataset[int]):
    """The worker gets each of the signals, from somebody else than its rank, while it reads a sample."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        assert get_worker_info() is not None
        os.kill(os.getpid(), (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)[index])
        time.sleep(0.05)
        return os.getpid()


class Starts(Dataset[int]):
    """The worker starts a program and terminates it, as decoders of videos do."""

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


def test_a_worker_goes_on() -> None:
    loader = make(Told())
    spare_workers(loader)
    [worker] = set(loader)
    assert not Path(f"/proc/{worker}").exists()  # it ends with its loader


def test_its_rank_can_end_it() -> None:
    loader = make(Told(), persistent_workers=True)
    spare_workers(loader)
    worker = next(iter(loader))
    [process] = loader._iterator._workers  # type: ignore[union-attr]
    assert process.pid == worker
    process.terminate()
    process.join(10)
    assert process.exitcode == 0


def test_it_outlives_the_thread_that_began_to_read() -> None:
    loader = make(Told(), persistent_workers=True)
    spare_workers(loader)
    workers: list[int] = []
    thread = threading.Thread(target=lambda: workers.extend(loader))
    thread.start()
    thread.join()
    assert len(set(workers)) == 1
    assert list(loader) == workers


def test_programs_that_it_starts_can_be_ended() -> None:
    loader = make(Starts())
    spare_workers(loader)
    assert list(loader) == [-signal.SIGTERM]


def test_what_the_user_wants_done_first_is_done() -> None:
    loader = make(Starts(), worker_init_fn=own_init)
    for _ in range(2):
        spare_workers(WrappedLoader(loader))
    assert isinstance(loader.worker_init_fn, HeedsItsRank)
    assert loader.worker_init_fn.init is own_init
    assert list(loader) == [-signal.SIGTERM]
    assert Path("init_0").exists()


def test_what_has_no_workers_is_left_alone() -> None:
    loader = DataLoader(Told())
    spare_workers(loader)
    spare_workers([1, 2])
    assert loader.worker_init_fn is None
