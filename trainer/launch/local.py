"""Ranks of one machine, started and watched by torch's elastic agent in the launching process."""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from trainwright.trainer.launch.failure import first_failure
from trainwright.trainer.launch.forkserver import hidden_main, start_forkserver
from trainwright.trainer.launch.interrupt import Interrupted
from trainwright.trainer.launch.rank import rank_main
from trainwright.trainer.launch.rendezvous import LoopbackRendezvous
from trainwright.trainer.launch.scratch import scratch
from trainwright.trainer.machine import num_cores

# Seconds between two looks of the agent at its ranks.
_MONITOR_INTERVAL = 0.1


def launch_local(cfg: DictConfig, verb: str) -> dict[str, float]:
    """Start the ranks of a run on this machine and wait for their end.

    Args:
        cfg: the resolved configuration, already written to its run directory.
        verb: fit, validate, test or predict.

    Returns:
        The metrics that rank 0 ended with, by name.

    Raises:
        RankError: if a rank failed; all others have ended.
        Interrupted: if this process was told to end; all ranks have ended.
    """
    records = Path(tempfile.mkdtemp(prefix="records-", dir=scratch()))
    start_forkserver()
    agent = _Agent(
        spec=_worker_spec(cfg, verb, records),
        logs_specs=DefaultLogsSpecs(log_dir=tempfile.mkdtemp(prefix="agent-", dir=scratch())),
        start_method="forkserver",
        shutdown_timeout=int(cfg.launch.grace_seconds) + 2,
    )
    with _ranks_ended(), _quiet_agent(), _signal_handlers_kept():
        try:
            result = agent.run()
        except SignalException as error:
            raise Interrupted(error.sigval) from None
    if result.is_failed():
        raise first_failure(records, agent.exit_codes(cfg.devices, result), Path(cfg.run_dir))
    metrics: dict[str, float] = result.return_values[0]
    return metrics


class _Agent(LocalElasticAgent):
    """The elastic agent, which also remembers its processes: how each of them ended tells who was first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._processes: dict[int, BaseProcess] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _temporary_files_in(scratch()), hidden_main():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        children = {child.pid: child for child in multiprocessing.active_children()}
        self._processes = {rank: children[pid] for rank, pid in pids.items() if pid in children}
        return pids

    def exit_codes(self, world_size: int, result: RunResult) -> dict[int, int | None]:
        """Exit code of every rank of this machine; None where it is not known.

        A rank that ended before its process could be remembered is known by the agent's own result.
        """
        codes: dict[int, int | None] = dict.fromkeys(range(world_size))
        codes.update((rank, process.exitcode) for rank, process in self._processes.items())
        codes.update((failure.local_rank, failure.exitcode) for failure in result.failures.values())
        return codes


@contextlib.contextmanager
def _ranks_ended() -> Iterator[None]:
    """End the ranks that the agent left: it was interrupted while it started or ended them."""
    before = multiprocessing.active_children()
    kind = multiprocessing.get_context("forkserver").Process
    try:
        yield
    finally:
        for child in multiprocessing.active_children():
            if isinstance(child, kind) and child not in before:
                child.kill()
                child.join()


def _worker_spec(cfg: DictConfig, verb: str, records: Path) -> WorkerSpec:
    return WorkerSpec(
        role="trainwright",
        local_world_size=cfg.devices,
        entrypoint=rank_main,
        args=(verb, Path(cfg.run_dir), _environment(cfg), records),
        rdzv_handler=LoopbackRendezvous(f"{cfg.name}-{os.getpid()}", port=cfg.launch.port),
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL,
        local_addr="127.0.0.1",
    )


def _environment(cfg: DictConfig) -> dict[str, str]:
    """Variables of this process, with those that one machine's ranks need to share it well."""
    threads = cfg.launch.threads or os.environ.get("OMP_NUM_THREADS") or max(1, num_cores() // cfg.devices)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        # Otherwise the backends listen on the address that the host name resolves to, open to the network.
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        environment.setdefault("NCCL_SOCKET_IFNAME", loopback)
    return environment


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence the log of the agent and its helpers: a failing rank's traceback is told once, by the caller."""
    names = ("torch.distributed.elastic", "torch.multiprocessing")
    known = [name for name in list(logging.root.manager.loggerDict) if name.startswith(names)]
    loggers = [logging.getLogger(name) for name in {*names, *known}]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """The agent installs handlers and leaves them; put those of the caller back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    previous = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """The agent writes a temporary file per rank and leaves it when the rank fails."""
    previous, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = previous
