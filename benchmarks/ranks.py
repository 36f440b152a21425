"""Ranks of a benchmark: processes with torchrun's environment, forked from one warm server."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.quiet import silence_lightning
from benchmarks.report import say

_PRELOAD = ["torch", "lightning.pytorch", "trainwright.launch.worker", "trainwright.strategies.data.zero"]
# After one rank has failed, the others are ended: they would wait for it until the process group's timeout.
_TIMEOUT = timedelta(minutes=5)


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, threads: int = 1, backend: str | None = "gloo"
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` ranks at once and return what each of them returned.

    A rank reports progress by ``benchmarks.report.say`` (rank 0 alone should).

    Args:
        function: of a module, so that a rank can import it.
        world_size: number of ranks.
        *args: can be pickled.
        threads: CPU threads of torch in each rank.
        backend: of the default process group; ``None``: there is none.

    Raises:
        RuntimeError: with the traceback of the rank that failed first; all others have been ended.
    """
    end_on_sigterm()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="trainwright-benchmark-") as folder:
        places = [_Place(rank, world_size, threads, backend, folder, free_port()) for rank in range(world_size)]
        pipes = [context.Pipe(duplex=False) for _ in places]
        processes = [
            context.Process(target=_rank_main, args=(place, sender, function, args))
            for place, (_, sender) in zip(places, pipes, strict=True)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            return _collect([receiver for receiver, _ in pipes])
        finally:
            for process in processes:
                if process.pid is not None:
                    process.join(timeout=5 if sys.exc_info()[0] is None else 0)
                    process.kill()
                    process.join()


class _Place:
    """Where a rank stands."""

    def __init__(self, rank: int, world_size: int, threads: int, backend: str | None, folder: str, port: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.threads = threads
        self.backend = backend
        self.folder = folder
        self.environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # By this Lightning sees that it need not start processes.
            "TORCHELASTIC_RUN_ID": "benchmark",
        }


def _collect(receivers: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        open_ = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        for receiver in wait(open_):
            rank = receivers.index(receiver)  # type: ignore[arg-type]
            try:
                kind, value = receivers[rank].recv()
            except EOFError:
                kind, value = "error", "it ended without a word (killed, or out of memory)"
            if kind == "error":
                raise RuntimeError(f"Rank {rank} of {len(receivers)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _rank_main(place: _Place, sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        sender.send(("result", _run(place, function, args)))
    except BaseException:
        sender.send(("error", traceback.format_exc()))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo that outlive the interpreter's end would abort the process.
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _run(place: _Place, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.update(place.environment)
    silence_lightning()
    torch.set_num_threads(place.threads)
    if torch.cuda.is_available() and place.rank < torch.cuda.device_count():
        torch.cuda.set_device(place.rank)
    if place.backend is not None:
        store = dist.FileStore(str(Path(place.folder, "store")), place.world_size)
        dist.init_process_group(
            place.backend, store=store, rank=place.rank, world_size=place.world_size, timeout=_TIMEOUT
        )
    try:
        return function(*args)
    finally:
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def end_on_sigterm() -> None:
    """Let SIGTERM raise, as Ctrl-C does, so that processes are ended and folders removed."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)


def threads_per_rank(world_size: int) -> int:
    """Cores of this machine for each rank, one at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // world_size)


def say_from_first(text: str) -> None:
    """Tell progress from rank 0."""
    if os.environ.get("RANK", "0") == "0":
        say(f"{time.strftime('%H:%M:%S')} {text}")
