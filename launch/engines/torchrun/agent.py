"""torchrun's agent in this process: starts the ranks of one of several machines, and restarts them together."""

import json
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from trainwright.core.processes.machine import address_of
from trainwright.core.processes.orphans import AGENT
from trainwright.launch.outcome.interruption import exit_timeout, handled_signals
from trainwright.launch.outcome.rank_records import NodeOutcome

# Signals that torch's agent forwards to its ranks.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Agents need a number for "no limit".
_NO_LIMIT = 1_000_000
# Longest wait of an agent for those of the other machines, in seconds.
_RENDEZVOUS_SECONDS = 900


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous of a run's agents.

    Attributes:
        run_id: shared by the agents, unique among present runs.
        host: name or address of the machine with the store.
        port: of the store.
        is_host: whether the agent of this machine opens the store.
        address: of this machine for the others; None = the one that its name resolves to.
    """

    run_id: str
    host: str
    port: int
    is_host: bool
    address: str | None = None


def run_agent(cfg: DictConfig, verb: str, rendezvous: Rendezvous) -> NodeOutcome:
    """Start the ranks of this machine, and wait for their exit and that of all others.

    Signals upon which the run saves are forwarded to the ranks, which end by them, as SIGTERM and SIGINT are.

    Args:
        cfg: the resolved configuration, as in its run directory.
        verb: fit, validate, test or predict.
        rendezvous: rendezvous with the agents of the other machines.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    limit = cfg.launch.max_restarts
    config = LaunchConfig(
        min_nodes=cfg.nodes,
        max_nodes=cfg.nodes,
        nproc_per_node=cfg.devices,
        run_id=rendezvous.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{rendezvous.host}:{rendezvous.port}",
        rdzv_configs={"is_host": str(rendezvous.is_host).lower(), "timeout": _RENDEZVOUS_SECONDS},
        max_restarts=_NO_LIMIT if limit is None else limit,
        monitor_interval=0.5,
        local_addr=rendezvous.address,
        signals_to_handle=",".join(number.name for number in {*_PASSED_ON, *handled_signals(cfg)}),
        shutdown_timeout=int(exit_timeout(cfg, verb)),
    )
    words = ("-m", "trainwright.command.engine_rank", str(Path(cfg.run_dir)), verb)
    try:
        elastic_launch(config, sys.executable)(*words)
    except ChildFailedError as error:
        return NodeOutcome(1, codes={rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:
        return NodeOutcome(128 + int(error.sigval), int(error.sigval))
    return NodeOutcome(0)


def agent_environment(address: str, host: str, port: int) -> dict[str, str]:
    """Return variables that make ranks use the agent's rendezvous and network interface, and exit with the agent.

    Args:
        address: of this machine for the others.
        host: address of the store of the run.
        port: of the store.
    """
    from trainwright.core.processes.rendezvous import INTERFACES  # imports torch, as the next
    from trainwright.launch.ranks.torchrun_store import HOST_ADDRESS, STORE

    interface = _interface_of(address)
    # Otherwise the backends listen on the address of the host name, which may not be reachable.
    found = {} if interface is None else {name: os.environ.get(name, interface) for name in INTERFACES}
    return {
        **found,
        AGENT: str(os.getpid()),
        STORE: json.dumps([host, port]),
        HOST_ADDRESS: address,
        # torch's agent would open a store on every interface and pass it to the ranks; with it, agents that rejoin
        # after a loss do not meet.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _interface_of(address: str) -> str | None:
    found = ((name, address_of(name)) for _, name in socket.if_nameindex())
    loopback = address.startswith("127.")
    return next((name for name, own in found if own == address or (loopback and own.startswith("127."))), None)
