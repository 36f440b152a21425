"""torchrun's agent in this process: starts the ranks of one machine of several, and starts them again together."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from trainwright.launch.outcome.ending import notices, seconds_to_end

# Signals that torch's agent passes on to its ranks.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Agents count restarts and know of no "no limit".
_NO_LIMIT = 1_000_000
# Longest wait of an agent for those of the other machines, in seconds.
_RENDEZVOUS_SECONDS = 900


@dataclass(frozen=True)
class Meeting:
    """Where the agents of a run meet.

    Attributes:
        run_id: the same for all, and for no other run at that time.
        host: name or address of the machine that holds the store.
        port: at which it listens.
        is_host: whether the agent of this machine opens the store.
        least_nodes: fewest machines to go on with; None = all.
        address: of this machine, by which the others reach it; None = what its name stands for.
    """

    run_id: str
    host: str
    port: int
    is_host: bool
    least_nodes: int | None = None
    address: str | None = None


@dataclass(frozen=True)
class AgentEnd:
    """How the ranks of one machine ended.

    Attributes:
        signal: number of the one that this process was told to end by; None: it was not.
        codes: exit codes of those that failed, by rank; empty: all went well, or were told to end.
    """

    signal: int | None = None
    codes: dict[int, int] = field(default_factory=dict)


def run_agent(cfg: DictConfig, verb: str, meeting: Meeting) -> AgentEnd:
    """Start the ranks of this machine, and wait for their end and that of all others.

    Signals that the run heeds by saving are passed on to the ranks, who end by them, as SIGTERM and SIGINT are.

    Args:
        cfg: the resolved configuration, as it lies in its run directory.
        verb: fit, validate, test or predict.
        meeting: where the agents of the other machines are met.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    limit = cfg.launch.max_restarts
    seconds = seconds_to_end(cfg, verb)
    config = LaunchConfig(
        min_nodes=meeting.least_nodes or cfg.nodes,
        max_nodes=cfg.nodes,
        nproc_per_node=cfg.devices,
        run_id=meeting.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{meeting.host}:{meeting.port}",
        rdzv_configs={"is_host": str(meeting.is_host).lower(), "timeout": _RENDEZVOUS_SECONDS},
        max_restarts=_NO_LIMIT if limit is None else limit,
        monitor_interval=0.5,
        local_addr=meeting.address,
        signals_to_handle=",".join(number.name for number in {*_PASSED_ON, *notices(cfg)}),
        shutdown_timeout=86400 if seconds is None else int(seconds) + 2,
    )
    words = ("-m", "trainwright.command.started", str(Path(cfg.run_dir)), verb)
    try:
        elastic_launch(config, sys.executable)(*words)
    except ChildFailedError as error:
        return AgentEnd(codes={rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as told:
        return AgentEnd(signal=int(told.sigval))
    return AgentEnd()
