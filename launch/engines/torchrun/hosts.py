"""The hosts of `launch=multinode`, as the configuration names them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

LOCAL = "localhost"
ANY = ("0.0.0.0", "::")  # noqa: S104 - only where the user asks for it


@dataclass(frozen=True)
class Host:
    """One machine of a run.

    Attributes:
        name: as ssh calls it.
        slots: ranks that it has room for; None = not said.
        is_local: whether its agent is started without ssh.
    """

    name: str
    slots: int | None = None
    is_local: bool = False


@dataclass(frozen=True)
class Endpoint:
    """Where agents meet.

    Attributes:
        address: to listen at; None: left open.
        port: TCP port; None: a free one.
    """

    address: str | None = None
    port: int | None = None


def hosts_of(cfg: DictConfig) -> list[Host]:
    """The hosts of a configuration, in order: the first has the first ranks."""
    given: Any = OmegaConf.to_container(cfg.launch.hosts) if OmegaConf.is_config(cfg.launch.hosts) else cfg.launch.hosts
    pairs = list(given.items()) if isinstance(given, dict) else [(name, None) for name in given]
    without_ssh = not cfg.launch.ssh
    return [Host(str(name), slots, without_ssh or name == LOCAL) for name, slots in pairs]


def endpoint_of(cfg: DictConfig) -> Endpoint:
    """Where `launch.rdzv_endpoint` says that agents meet.

    Raises:
        ValueError: if it is no address with a port behind it or without.
    """
    given = cfg.launch.rdzv_endpoint
    if given is None:
        return Endpoint()
    address, separator, port = str(given).rpartition(":")
    if not separator or ("]" in port) or (":" in address and not address.startswith("[")):
        return Endpoint(str(given).strip("[]"))
    number = int(port)
    if not 1 <= number <= 65535 or not address:
        raise ValueError("out of range")
    return Endpoint(address.strip("[]"), number)


def is_address(name: str) -> bool:
    """Whether a name is an IP address."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def is_mine(address: str) -> bool:
    """Whether an address, or what a name stands for, is one of this machine."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, place[0]) for family, _, _, _, place in found)


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def host_problems(cfg: DictConfig) -> Iterator[str]:
    """What is impossible about `launch.hosts`, and what goes with them."""
    given = cfg.launch.hosts
    if not OmegaConf.is_config(given) or not given:
        yield f"launch.hosts={given}: must be a list like [a,b], or a mapping of hosts and slots like {{a:8,b:8}}"
        return
    hosts = hosts_of(cfg)
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield (
            f"launch.hosts names {', '.join(twice)} more than once: each has one agent, which starts all ranks of its "
            "host; type it once, and as many devices as it has"
        )
    odd = [name for name in names if not name or name.startswith("-") or any(sign.isspace() for sign in name)]
    if odd:
        yield f"launch.hosts: {odd[0]!r} is no name of a host; type names or addresses as ssh takes them"
    if len(hosts) != cfg.nodes:
        yield f"launch.hosts names {len(hosts)} host(s), but nodes={cfg.nodes}; type nodes={len(hosts)}"
    for host in hosts:
        if host.slots is not None and isinstance(cfg.devices, int) and not cfg.devices <= _number(host.slots):
            yield (
                f"devices={cfg.devices} with launch.hosts.{host.name}={host.slots}: every host has as many ranks; type "
                f"devices={host.slots}, or leave {host.name} out"
            )
    yield from _endpoint_problems(cfg, hosts)


def _number(slots: Any) -> int:
    return slots if isinstance(slots, int) else 0


def _endpoint_problems(cfg: DictConfig, hosts: list[Host]) -> Iterator[str]:
    try:
        endpoint = endpoint_of(cfg)
    except ValueError:
        yield (
            f"launch.rdzv_endpoint={cfg.launch.rdzv_endpoint}: must be an address, or address:port with a port of 1 to "
            "65535; leave it out to meet on the first host, at a free port"
        )
        return
    if endpoint.address in ANY and endpoint.port is None:
        yield (
            f"launch.rdzv_endpoint={endpoint.address} listens on every interface; type the port too, like "
            f"{endpoint.address}:29400, or leave it out to listen on one address"
        )
    least = cfg.launch.min_nodes
    if least is not None and not 1 <= least <= len(hosts):
        yield f"launch.min_nodes={least}: must be 1 to {len(hosts)}, the number of hosts; leave it out for all"
    if least is not None and least < len(hosts) and cfg.launch.max_restarts == 0:
        yield (
            f"launch.min_nodes={least} with launch.max_restarts=0: ranks are never started again, on fewer hosts "
            "either; type launch.max_restarts=3"
        )
    if cfg.launch.connect_timeout <= 0:
        yield f"launch.connect_timeout={cfg.launch.connect_timeout:g}: must be more than 0 seconds; 60 is the default"
