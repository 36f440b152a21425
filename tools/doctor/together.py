"""Starting ranks to look around, or joining those that a launcher has started."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from trainwright.core.processes.machine import num_cores, threads_of_rank
from trainwright.core.run.launcher import Launcher
from trainwright.tools.doctor.collect import HostReport, import_torch, look_at_devices, report_host, within
from trainwright.tools.doctor.environment import judge_devices
from trainwright.tools.doctor.finding import Finding
from trainwright.tools.doctor.machine import Demand
from trainwright.tools.doctor.network import judge_not_met

if TYPE_CHECKING:  # its module imports torch
    from trainwright.tools.doctor.ranks import RankResult

# All that ranks do together, and what they get on top of it to end.
RANK_SECONDS = 150.0
GRACE_SECONDS = 5.0
MEETING_SECONDS = 320.0  # the wait of `meet`, and a little


@dataclass(frozen=True)
class Wish:
    """What the run would be.

    Args:
        devices: ranks of this machine; ``None``: all GPUs, or two ranks on the CPU.
        accelerator: ``auto``, ``cpu`` or ``gpu``.
        threads: of each rank; ``None``: the cores divided by the ranks, as in a run.
        workers: of the data loaders of one rank.
        run_dir: that it would write to.
        figures: measure what devices reach, too.
    """

    devices: int | None = None
    accelerator: str = "auto"
    threads: int | None = None
    workers: int = 0
    run_dir: str = "runs"
    figures: bool = False


@dataclass(frozen=True)
class Seen:
    """Everything that is known when all have answered.

    Args:
        hosts: reports by name of the machine.
        results: of all ranks, in order; empty if none could be started.
        on_gpu: whether ranks compute on GPUs.
        local_size: ranks of a machine.
    """

    hosts: Mapping[str, HostReport]
    results: list[RankResult]
    on_gpu: bool
    local_size: int


def see_locally(wish: Wish) -> Seen:
    """Examine this machine, and start ranks on it."""
    from trainwright.launch.ranks.forkserver import start_forkserver

    start_forkserver()  # it imports while this process does
    host = socket.gethostname()
    found = import_torch()
    if found:
        return Seen({host: HostReport(host, found)}, [], False, wish.devices or 1)
    more, facts = look_at_devices()
    on_gpu = wish.accelerator != "cpu" and facts.usable > 0
    devices = wish.devices or (facts.usable if on_gpu else min(2, num_cores()))
    demand = Demand(devices, wish.workers, int(threads_of_rank(wish.threads, devices)), on_gpu)
    report = _report(wish, host, demand, [*more, judge_devices(facts, demand, wish.accelerator)])
    # More ranks than GPUs are reported, and compute on the CPU.
    results = _started(replace(wish, devices=devices), demand.threads, on_gpu and devices <= facts.usable)
    return Seen({host: report}, results, on_gpu, devices)


def _report(wish: Wish, host: str, demand: Demand, found: Sequence[Finding]) -> HostReport:
    if wish.figures:
        return HostReport(host)
    report = report_host(host, wish.run_dir, demand)
    report.findings.extend(found)
    return report


def _started(wish: Wish, threads: int, on_gpu: bool) -> list[RankResult]:
    from trainwright.launch.ranks.environment import rank_environment
    from trainwright.launch.ranks.local_store import LocalStore
    from trainwright.launch.ranks.supervisor import Supervisor
    from trainwright.tools.doctor.ranks import StoreBoard

    devices = wish.devices or 1
    cfg = OmegaConf.create({"name": "doctor", "devices": devices, "launch": {"threads": threads}})
    with LocalStore() as store, Supervisor(rank_main, (devices, on_gpu, wish.figures)) as ranks:
        for rank in range(devices):
            ranks.start_rank(rank, rank_environment(cfg, rank, store.port))
        end = time.monotonic() + RANK_SECONDS
        while ranks.living and time.monotonic() < end:
            for ended in ranks.wait(max(0.0, end - time.monotonic())):
                if ended.failed:  # the others wait for it in vain
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        ranks.end(ranks.living, grace=0.0)
        return StoreBoard(store.store).results(devices, 0.5)


def rank_main(environment: Mapping[str, str], world_size: int, on_gpu: bool, figures: bool) -> None:
    """One rank that :func:`see_locally` has started.

    Raises:
        SystemExit: with exit code 1 if it failed; the board says how.
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


def see_with(launcher: Launcher, wish: Wish) -> Seen | None:
    """Examine this machine, and join the ranks of a launcher.

    Returns:
        All reports and results on rank 0, and on a rank that does not reach the others what it knows; else None.
    """
    host, local = socket.gethostname(), launcher.local_world_size
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    found = import_torch()
    if found:
        return Seen({host: HostReport(host, found)}, [], False, local)
    import torch

    from trainwright.launch.ranks.torchrun_store import meet
    from trainwright.tools.doctor.measure import threads_from_environment
    from trainwright.tools.doctor.ranks import StoreBoard, examine

    threads_from_environment()
    usable = torch.cuda.device_count() if wish.accelerator != "cpu" else 0
    report = HostReport(host)
    if local_rank == 0:
        more, facts = look_at_devices()
        machines = max(1, launcher.world_size // local)
        demand = Demand(local, wish.workers, int(threads_of_rank(wish.threads, local)), usable > 0, machines)
        report = _report(wish, host, demand, [*more, judge_devices(facts, demand, wish.accelerator)])
    try:
        store = within(MEETING_SECONDS, lambda: meet(launcher))
    except (TimeoutError, RuntimeError) as failure:
        report.findings.append(judge_not_met(launcher.rank, str(failure)))
        return Seen({host: report}, [], usable > 0, local)
    board = StoreBoard(store)
    if local_rank == 0:
        board.put(f"facts/{host}", report.to_json())
    device = torch.device("cuda", local_rank % usable) if usable else torch.device("cpu")
    if usable:
        torch.cuda.set_device(device)
    examine(store, launcher.rank, launcher.world_size, local, device, wish.figures)
    if launcher.rank != 0:
        return None
    results = board.results(launcher.world_size, RANK_SECONDS)
    hosts = {}
    for name in dict.fromkeys(result.host for result in results if result.host):
        text = board.get(f"facts/{name}", 1.0)
        if text is not None:
            hosts[name] = HostReport.from_json(text)
    return Seen(hosts, results, bool(usable), local)
