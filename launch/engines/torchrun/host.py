"""What `launch=multinode` starts on each host: an agent of torchrun, which starts the ranks of the host.

    python -m trainwright.launch.engines.torchrun.host

It hears what to do over standard input (:mod:`trainwright.launch.engines.torchrun.words`), and ends when that ends:
then the command is gone, or the connection to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from trainwright.core.processes.orphans import AGENT
from trainwright.core.run.interrupt import Interrupted, raise_interrupted
from trainwright.core.run.run_directory import read_config
from trainwright.launch.engines.torchrun.agent import AgentEnd, Meeting, run_agent
from trainwright.launch.engines.torchrun.hosts import is_address, is_mine
from trainwright.launch.engines.torchrun.words import Setup, to_command, versions
from trainwright.launch.outcome.ending import seconds_to_end
from trainwright.launch.outcome.ends import ends_folder
from trainwright.launch.ranks.threads import threads_of_rank

if TYPE_CHECKING:
    from trainwright.launch.ranks.rendezvous import LocalStore

PROBE = "probe"
# A folder of a network may show a new file late.
_SECONDS_TO_SEE = 10.0
# Variables that the user may decide.
_DECIDED = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Of SIOCGIFADDR in <linux/sockios.h>.
_GET_ADDRESS = 0x8915


def main() -> int:
    """The agent; returns its exit code."""
    said = _Said()
    first = said.message()
    if first is None:
        return 128 + signal.SIGTERM
    setup = Setup(**first)
    problem = problem_here(setup)
    if problem is not None:
        _say(problem=problem)
        return 2
    address, client = address_here(setup)
    _say(ready=True, address=address, client=client)
    cfg = read_config(setup.run_dir)
    store: LocalStore | None = None
    while message := said.message():
        if "store" in message:
            store = _open_store(message["store"])
        elif "begin" in message:
            code = _begin(cfg, setup, said, address, *message["begin"])
            if store is not None:
                said.wait_for_end()  # the agents of the other hosts may still need it
            return code
        else:
            break
    return 128 + signal.SIGTERM


def _begin(cfg: DictConfig, setup: Setup, said: _Said, address: str | None, host: str, port: int) -> int:
    os.environ.update(environment_here(cfg, setup, address or _address_towards(host, port), host, port))
    signal.signal(signal.SIGTERM, raise_interrupted)
    signal.signal(signal.SIGINT, raise_interrupted)
    said.listen(cfg, setup.verb)
    try:
        end = _run(cfg, setup, host, port)
    except Interrupted as interrupted:
        end = AgentEnd(int(interrupted.number))
    said.obey_no_more()
    _say(end=asdict(end))
    return 1 if end.codes else 0


def _run(cfg: DictConfig, setup: Setup, host: str, port: int) -> AgentEnd:
    """Be an agent."""
    from trainwright.launch.ranks.meeting import HOST_ADDRESS

    meeting = Meeting(setup.run_id, host, port, False, cfg.launch.min_nodes, os.environ[HOST_ADDRESS])
    return run_agent(cfg, setup.verb, meeting)


class _Said:
    """What the command says."""

    def __init__(self) -> None:
        self._input = sys.stdin
        self._obeys = True
        self._thread: threading.Thread | None = None

    def message(self) -> dict[str, Any] | None:
        """The next one; None: the command is gone."""
        line = self._input.readline()
        if not line:
            return None
        found: dict[str, Any] = json.loads(line)
        return found

    def listen(self, cfg: DictConfig, verb: str) -> None:
        """Pass signals on to this process from now on, and end it when the command is gone."""
        self._thread = threading.Thread(target=self._listen, args=(cfg, verb), name="trainwright-command", daemon=True)
        self._thread.start()

    def obey_no_more(self) -> None:
        """The ranks have ended: nothing is to be passed on any more."""
        self._obeys = False

    def wait_for_end(self) -> None:
        """Wait until the command is gone, or needs this process no more."""
        if self._thread is not None:
            self._thread.join()

    def _listen(self, cfg: DictConfig, verb: str) -> None:
        while message := self.message():
            self._obey(message["seconds"], message["signal"])
        self._obey(seconds_to_end(cfg, verb), signal.SIGTERM)

    def _obey(self, seconds: float | None, number: int) -> None:
        if self._obeys:
            _end_in(seconds, number)
            os.kill(os.getpid(), number)


def _end_in(seconds: float | None, number: int) -> None:
    """End this process at the latest so many seconds from now, and with it its ranks; None = never."""
    if seconds is None:
        return

    def end() -> None:
        time.sleep(seconds)
        os._exit(128 + number)  # the kernel kills the ranks

    threading.Thread(target=end, daemon=True).start()


def problem_here(setup: Setup) -> str | None:
    """Why the run cannot be on this host; None: it can."""
    here = versions()
    differ = [name for name, there in setup.versions.items() if here.get(name) != there]
    if differ:
        what = ", ".join(f"{name} {here.get(name)} (the command has {setup.versions[name]})" for name in differ)
        return f"other versions are installed: {what}; install the same, or name the right one with launch.python=..."
    probe = ends_folder(Path(setup.run_dir)) / PROBE
    end = time.monotonic() + _SECONDS_TO_SEE
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if probe.read_text(encoding="utf-8") == setup.token:
                break
        time.sleep(0.1)
    else:
        return (
            f"the run directory {Path(setup.run_dir).absolute()} is not there, or is another one than that of the "
            "command: all hosts must see one and the same folder; type run_dir=... on a file system that they share"
        )
    if setup.interface is not None and setup.interface not in dict(_interfaces()):
        there = ", ".join(name for name, _ in _interfaces())
        return f"there is no network interface {setup.interface}; type launch.interface=..., interfaces: {there}"
    return None


def address_here(setup: Setup) -> tuple[str | None, str | None]:
    """The address of this host by which the others reach it, and that of the command as this host sees it.

    None where nothing tells: the host of the command itself, which no ssh has come to.
    """
    over_ssh = os.environ.get("SSH_CONNECTION", "").split()
    client = over_ssh[0] if len(over_ssh) == 4 else None
    if setup.interface is not None:
        return dict(_interfaces())[setup.interface], client
    if setup.address is not None:
        return setup.address, client
    if is_address(setup.host) and is_mine(setup.host):
        return setup.host, client
    return (over_ssh[2] if client is not None else None), client


def environment_here(cfg: DictConfig, setup: Setup, address: str, host: str, port: int) -> dict[str, str]:
    """Variables of the ranks of this host.

    Args:
        cfg: the resolved configuration.
        setup: what the agent was told.
        address: of this host.
        host: address of the store of the run.
        port: of the same.
    """
    told = setup.environment
    own = agent_environment(address, host, port, setup.interface)
    threads = {"OMP_NUM_THREADS": threads_of_rank(cfg, told)}
    return {**threads, **own, **told, **{name: own[name] for name in own if name not in _DECIDED}}


def agent_environment(address: str, host: str, port: int, interface: str | None = None) -> dict[str, str]:
    """Variables by which ranks meet where this agent says, over the network that it says, and end with it.

    Args:
        address: of this machine, by which the others reach it.
        host: address of the store of the run.
        port: of the same.
        interface: of this machine; None = the one that has the address.
    """
    from trainwright.launch.ranks.meeting import HOST_ADDRESS, STORE

    interface = interface or _interface_of(address)
    # Otherwise the backends listen on what the name of the machine stands for, which may be no address of a network.
    found = {} if interface is None else {name: os.environ.get(name, interface) for name in _DECIDED}
    return {
        **found,
        AGENT: str(os.getpid()),
        STORE: json.dumps([host, port]),
        HOST_ADDRESS: address,
        # torch's agent would open a store of its own, on every interface, and hand it to the ranks; with it, agents
        # that come back after a loss do not meet.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _open_store(place: list[Any]) -> LocalStore:
    """Be where all agents meet."""
    from trainwright.launch.ranks.rendezvous import LocalStore

    listen, told, port = place
    store = LocalStore(port, listen, told)
    _say(store=[store.address, store.port])
    return store


def _address_towards(host: str, port: int) -> str:
    with closing(socket.create_connection((host, port), timeout=30.0)) as probe:
        return str(probe.getsockname()[0])


def _interfaces() -> Iterator[tuple[str, str]]:
    """Names of interfaces that are up and have an IPv4 address, with the first one of each."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])


def _interface_of(address: str) -> str | None:
    loopback = address.startswith("127.")
    return next((name for name, own in _interfaces() if own == address or (loopback and own.startswith("127."))), None)


def _say(**message: Any) -> None:
    # A line of its own, whatever was printed before it.
    print(f"\n{to_command(**message)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
