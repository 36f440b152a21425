"""Examination of machines, with ranks started here or by a launcher."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from trainwright.core.processes.machine import num_cores, threads_of_rank
from trainwright.core.run.launcher import Launcher
from trainwright.core.text.plain import rebuilt
from trainwright.tools.doctor.collect import HostReport, find_devices, import_torch, report_host, within
from trainwright.tools.doctor.environment import judge_devices
from trainwright.tools.doctor.finding import Finding
from trainwright.tools.doctor.machine import Demand
from trainwright.tools.doctor.network import judge_rendezvous

if TYPE_CHECKING:  # its module imports torch
    from trainwright.tools.doctor.ranks import RankResult

# Limit of all measurements of ranks, and their grace period.
RANK_SECONDS = 150.0
GRACE_SECONDS = 5.0
MEETING_SECONDS = 320.0  # slightly more than `meet` waits


@dataclass(frozen=True)
class DoctorRequest:
    """Run to check for.

    Args:
        devices: ranks on this machine; ``None``: all GPUs, or two ranks on the CPU.
        accelerator: ``auto``, ``cpu`` or ``gpu``.
        threads: per rank; ``None``: cores divided by ranks, as in a run.
        workers: data-loader processes per rank.
        run_dir: folder the run would write to.
        figures: measure devices too.
    """

    devices: int | None = None
    accelerator: str = "auto"
    threads: int | None = None
    workers: int = 0
    run_dir: str = "runs"
    figures: bool = False


@dataclass(frozen=True)
class Examination:
    """Reports of machines and results of ranks.

    Args:
        hosts: host name -> report.
        results: of all ranks, by rank; empty if none could be started.
        on_gpu: whether ranks compute on GPUs.
        local_size: ranks per machine.
    """

    hosts: Mapping[str, HostReport]
    results: list[RankResult]
    on_gpu: bool
    local_size: int


def examine_locally(request: DoctorRequest) -> Examination:
    """Examine this machine with ranks started on it."""
    from trainwright.launch.ranks.forkserver import start_forkserver

    start_forkserver()  # imports concurrently with this process
    host = socket.gethostname()
    found = import_torch()
    if found:
        return Examination({host: HostReport(host, found)}, [], False, request.devices or 1)
    found, facts = find_devices()
    on_gpu = request.accelerator != "cpu" and facts.usable > 0
    devices = request.devices or (facts.usable if on_gpu else min(2, num_cores()))
    demand = Demand(devices, request.workers, int(threads_of_rank(request.threads, devices)), on_gpu)
    report = _report(request, host, demand, [*found, judge_devices(facts, demand, request.accelerator)])
    # More ranks than GPUs are reported as an error, and compute on the CPU.
    results = _started(devices, demand.threads, on_gpu and devices <= facts.usable, request.figures)
    return Examination({host: report}, results, on_gpu, devices)


def _report(request: DoctorRequest, host: str, demand: Demand, found: Sequence[Finding]) -> HostReport:
    if request.figures:
        return HostReport(host)
    report = report_host(host, request.run_dir, demand)
    report.findings.extend(found)
    return report


def _started(devices: int, threads: int, on_gpu: bool, figures: bool) -> list[RankResult]:
    from trainwright.launch.ranks.rendezvous import LocalStore, rank_environment
    from trainwright.launch.ranks.supervisor import Supervisor
    from trainwright.tools.doctor.ranks import StoreBoard

    cfg = OmegaConf.create({"name": "doctor", "devices": devices, "launch": {"threads": threads}})
    with LocalStore() as store, Supervisor(rank_main, (devices, on_gpu, figures)) as ranks:
        for rank in range(devices):
            ranks.start_rank(rank, rank_environment(cfg, rank, store.port))
        end = time.monotonic() + RANK_SECONDS
        while ranks.living and time.monotonic() < end:
            for ended in ranks.wait(max(0.0, end - time.monotonic())):
                if ended.failed:  # the others would wait until the time limit
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        ranks.end(ranks.living, grace=0.0)
        return StoreBoard(store.store).results(devices, 0.5)


def rank_main(environment: Mapping[str, str], world_size: int, on_gpu: bool, figures: bool) -> None:
    """Run one rank started by :func:`examine_locally`.

    Raises:
        SystemExit: with exit code 1 if it failed; its result has the reason.
    """
    os.environ.update(environment)
    from trainwright.core.processes.watch import ShutdownWatch
    from trainwright.launch.ranks.forkserver import restore_defaults

    restore_defaults()
    ShutdownWatch.start_in_rank(0.0)

    import torch
    from torch.distributed import TCPStore

    from trainwright.tools.doctor.measure import threads_from_environment
    from trainwright.tools.doctor.ranks import examine

    threads_from_environment()
    rank = int(environment["RANK"])
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
    result = examine(store, rank, world_size, world_size, device, figures)
    raise SystemExit(0 if result.failure is None else 1)


def examine_under_launcher(launcher: Launcher, request: DoctorRequest) -> Examination | None:
    """Examine this machine, and join the ranks of a launcher.

    Returns:
        All reports and results on rank 0; on a rank that fails to reach the rendezvous its own report; else ``None``.
    """
    host, local = socket.gethostname(), launcher.local_world_size
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    found = import_torch()
    if found:
        return Examination({host: HostReport(host, found)}, [], False, local)
    import torch

    from trainwright.launch.ranks.torchrun_store import meet
    from trainwright.tools.doctor.measure import threads_from_environment
    from trainwright.tools.doctor.ranks import StoreBoard, examine

    threads_from_environment()
    usable = torch.cuda.device_count() if request.accelerator != "cpu" else 0
    report = HostReport(host)
    if local_rank == 0:
        found, facts = find_devices()
        machines = max(1, launcher.world_size // local)
        demand = Demand(local, request.workers, int(threads_of_rank(request.threads, local)), usable > 0, machines)
        report = _report(request, host, demand, [*found, judge_devices(facts, demand, request.accelerator)])
    try:
        store = within(MEETING_SECONDS, lambda: meet(launcher))
    except (TimeoutError, RuntimeError) as failure:
        report.findings.append(judge_rendezvous(launcher.rank, str(failure)))
        return Examination({host: report}, [], usable > 0, local)
    board = StoreBoard(store)
    if local_rank == 0:
        board.put(f"facts/{host}", asdict(report))
    device = torch.device("cuda", local_rank % usable) if usable else torch.device("cpu")
    if usable:
        torch.cuda.set_device(device)
    examine(store, launcher.rank, launcher.world_size, local, device, request.figures)
    if launcher.rank != 0:
        return None
    results = board.results(launcher.world_size, RANK_SECONDS)
    names = dict.fromkeys(result.host for result in results if result.host)
    reports = {name: rebuilt(HostReport, board.get(f"facts/{name}", 1.0)) for name in names}
    sent = {name: report for name, report in reports.items() if report is not None}
    return Examination(sent, results, bool(usable), local)
