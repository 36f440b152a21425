"""Checks of the network: interfaces that ranks would use, names, and measured speed."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from trainwright.core.processes.machine import address_of
from trainwright.strategies.contract.communication.advice import MeasuredLink
from trainwright.tools.doctor.finding import Finding, error, ok, rate, time_of, warning

AREA = "network"
GLOO, NCCL, MASTER = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"
_VARIABLES = (GLOO, NCCL, MASTER)
# Bridges and tunnels of containers and virtual machines: other machines are unreachable or slow through them.
_VIRTUAL = re.compile(r"docker|br-|veth|virbr|cni|flannel|cali|tunl|podman|lxc|lxd|vnet|ifb|dummy")
# A pair is slow below this part of the median bandwidth, or above this multiple of the median latency.
_SLOW_BANDWIDTH, _SLOW_LATENCY, _NOTICEABLE_LATENCY = 1 / 3, 20.0, 1e-3
# Directions between three ranks; with fewer the slow rank cannot be identified.
_FEWEST_DIRECTIONS = 6
# Bytes/s between machines; less is an administration network, or a link that negotiated 1 Gb/s or less.
_LEAST_ACROSS = 100e6
_SPEED_SHARE = 0.3


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Args:
        name: as shown by ``ip link``.
        up: whether it is up.
        loopback: whether it is a loopback interface.
        address: IPv4; empty: none.
        speed: negotiated bytes per second; ``None``: unknown.
    """

    name: str
    up: bool
    loopback: bool = False
    address: str = ""
    speed: float | None = None

    @property
    def virtual(self) -> bool:
        """True if its name is that of a container or VM bridge."""
        return _VIRTUAL.match(self.name) is not None


@dataclass(frozen=True)
class NetworkFacts:
    """Network configuration of one machine.

    Args:
        host: host name.
        addresses: that the host name resolves to.
        interfaces: all interfaces.
        variables: environment variables that choose interfaces and the rendezvous.
        master: addresses that ``MASTER_ADDR`` resolves to.
    """

    host: str
    addresses: Sequence[str] = ()
    interfaces: Sequence[Interface] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    master: Sequence[str] = ()


@dataclass(frozen=True)
class Pair:
    """Measured link from one rank to another.

    Args:
        source: rank.
        target: rank.
        latency: one-way seconds of a small message.
        bandwidth: bytes per second.
    """

    source: int
    target: int
    latency: float
    bandwidth: float


# ---------------------------------------------------------------------------------------------------------------------
# Facts


def network_facts() -> NetworkFacts:
    """Return the network configuration of this machine."""
    host = socket.gethostname()
    variables = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    master = _resolve(variables[MASTER]) if MASTER in variables else []
    return NetworkFacts(host, _resolve(host), interfaces(), variables, master)


def _resolve(name: str) -> list[str]:
    try:
        return sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def interfaces() -> list[Interface]:
    """Return the interfaces of this machine."""
    root, found = Path("/sys/class/net"), []
    for _, name in socket.if_nameindex():
        flags = int(_text(root / name / "flags") or "0", 16)
        speed = _text(root / name / "speed")
        # Mb/s; -1 without a cable.
        bytes_per_second = int(speed) * 1e6 / 8 if speed.isdecimal() else None
        found.append(Interface(name, bool(flags & 0x1), bool(flags & 0x8), address_of(name), bytes_per_second))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------------------------------
# Interfaces


def chosen_interfaces(variable: str, value: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces that a variable selects.

    Args:
        variable: gloo's takes comma-separated names; NCCL's takes prefixes, ``=`` before exact names and ``^``
            before excluded ones.
        value: of the variable.
        interfaces: of the machine.
    """
    if variable == GLOO:
        names = [name.strip() for name in value.split(",")]
        return [each for each in interfaces if each.name in names]
    leaves_out, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = [name.strip() for name in value.lstrip("^=").split(",") if name.strip()]
    return [each for each in interfaces if leaves_out != any(_matches(each.name, name, exact) for name in names)]


def _matches(name: str, given: str, exact: bool) -> bool:
    return name == given if exact else name.startswith(given)


def judge_network(facts: NetworkFacts, hosts: int, on_gpu: bool = False) -> list[Finding]:
    """Check the interfaces selected by the environment, and name resolution.

    Args:
        facts: of one machine.
        hosts: number of machines of the run.
        on_gpu: whether ranks compute on GPUs, and so use NCCL.
    """
    found = [
        *(each for name in (GLOO, NCCL) for each in _variable(name, facts, hosts)),
        *_missing_variable(facts, hosts, on_gpu),
        *_name(facts, hosts),
        *_master(facts, hosts),
    ]
    usable = ", ".join(f"{each.name} {each.address}" for each in _usable(facts)) or "none that reaches other machines"
    return [*found, ok(AREA, "interfaces", usable)]


def _usable(facts: NetworkFacts) -> list[Interface]:
    return [each for each in facts.interfaces if each.up and each.address and not each.loopback and not each.virtual]


def _suggestion(variable: str, facts: NetworkFacts) -> str:
    names = [each.name for each in _usable(facts)]
    if not names:
        return f"unset {variable}, and give the machine an address that the others reach (see ip addr)"
    more = f" (or {', '.join(names[1:])})" if names[1:] else ""
    return f"export {variable}={names[0]}{more}, or unset {variable}"


def _variable(variable: str, facts: NetworkFacts, hosts: int) -> list[Finding]:
    value = facts.variables.get(variable)
    if value is None:
        return []
    chosen, todo = chosen_interfaces(variable, value, facts.interfaces), _suggestion(variable, facts)
    there = ", ".join(each.name for each in facts.interfaces)
    given = f"{variable}={value}"
    names = map(str.strip, value.split(",")) if variable == GLOO else ()
    missing = [name for name in names if name not in {each.name for each in facts.interfaces}]
    if missing or not chosen:
        what = f"{given}: there is no interface {', '.join(missing) or value} (there are: {there})"
        return [error(AREA, variable, what, "the name of an interface that is up", todo)]
    down = [each.name for each in chosen if not each.up or not each.address]
    if len(down) == len(chosen) or (down and variable == GLOO):
        what = f"{given}: {', '.join(down)} is down or has no address"
        return [error(AREA, variable, what, "an interface that is up", todo)]
    live = [each for each in chosen if each.up and each.address]
    if hosts > 1 and all(each.loopback for each in live):
        what = f"{given}: {', '.join(each.name for each in live)} reaches this machine alone"
        return [error(AREA, variable, what, f"an interface that the other {hosts - 1} machines reach", todo)]
    if any(each.virtual for each in live):
        bridges = ", ".join(each.name for each in live if each.virtual)
        what = f"{given}: {bridges} is a bridge of containers or virtual machines"
        judge = error if hosts > 1 and all(each.virtual or each.loopback for each in live) else warning
        return [judge(AREA, variable, what, "a network card", todo)]
    return [ok(AREA, variable, f"{given}: " + ", ".join(f"{each.name} {each.address}" for each in live))]


def _missing_variable(facts: NetworkFacts, hosts: int, on_gpu: bool) -> list[Finding]:
    """Warn about default interfaces: gloo's is that of the host name's address, NCCL's the first it finds."""
    if hosts == 1:
        return []
    by_address = {each.address: each for each in facts.interfaces if each.address}
    found = []
    taken = next((by_address[address] for address in facts.addresses if address in by_address), None)
    if GLOO not in facts.variables and taken is not None and taken.virtual:
        what = f"gloo would use {taken.name}, the interface of the host name {facts.host}"
        found.append(warning(AREA, GLOO, what, "a network card", _suggestion(GLOO, facts)))
    if on_gpu and NCCL not in facts.variables and len(_usable(facts)) > 1:
        names = ", ".join(f"{each.name} {each.address}" for each in _usable(facts))
        what = f"several interfaces, NCCL's sockets would use the first: {names}"
        found.append(warning(AREA, NCCL, what, "the name of the fastest one", _suggestion(NCCL, facts)))
    return found


def _name(facts: NetworkFacts, hosts: int) -> list[Finding]:
    check, names = "host name", f"{facts.host} resolves to {', '.join(facts.addresses) or 'no address'}"
    addresses = [each.address for each in _usable(facts)]
    line = f"add '{addresses[0] if addresses else '<its address>'} {facts.host}' to /etc/hosts"
    if GLOO in facts.variables or hosts == 1:  # ranks of one machine use the loopback interface
        return [ok(AREA, check, names)]
    if not facts.addresses:
        return [error(AREA, check, names, "its address in the network of the other machines", line)]
    if all(_is_loopback(address) for address in facts.addresses):
        what = f"{names}: gloo would send the other machines its loopback address"
        todo = f"{line}, or {_suggestion(GLOO, facts).split(', or unset')[0]}"
        return [error(AREA, check, what, "its address in the network of the other machines", todo)]
    return [ok(AREA, check, names)]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _master(facts: NetworkFacts, hosts: int) -> list[Finding]:
    given = facts.variables.get(MASTER)
    if given is None or hosts == 1:
        return []
    what = f"{MASTER}={given} resolves to {', '.join(facts.master) or 'no address'}"
    if facts.master and not all(_is_loopback(address) for address in facts.master):
        return [ok(AREA, MASTER, what)]
    todo = "torchrun --rdzv-endpoint=<address of the first machine>:<port> (or --master-addr=)"
    return [error(AREA, MASTER, what, "an address of the first machine that all machines reach", todo)]


# ---------------------------------------------------------------------------------------------------------------------
# Speed


def judge_pairs(
    pairs: Sequence[Pair], hosts: Sequence[str], speeds: Mapping[str, float] | None = None, rounds: str = ""
) -> list[Finding]:
    """Find pairs of ranks slower than the others, and a network slower than it should be.

    Args:
        pairs: measured links.
        hosts: host name by rank.
        speeds: host -> bytes per second of its fastest usable interface.
        rounds: note on pairs that were left out.
    """
    found = []
    for name, is_within in (("within a machine", True), ("across machines", False)):
        some = [pair for pair in pairs if (hosts[pair.source] == hosts[pair.target]) is is_within]
        if not some:
            continue
        slow = _slow(some)
        found += [_slow_finding(slow, some, hosts, name)] if slow else []
        if not is_within:
            found += _slow_network(some, hosts, speeds or {})
        latency, bandwidth = median(p.latency for p in some), median(p.bandwidth for p in some)
        lowest = min(p.bandwidth for p in some)
        text = (
            f"{len(some)} directions: {time_of(latency)} a message, {rate(bandwidth)} (median; lowest {rate(lowest)})"
        )
        found.append(ok(AREA, f"pairs {name}", text + rounds))
    return found


def _slow(pairs: Sequence[Pair]) -> list[Pair]:
    if len(pairs) < _FEWEST_DIRECTIONS:
        return []
    latency, bandwidth = median(p.latency for p in pairs), median(p.bandwidth for p in pairs)
    most = max(_SLOW_LATENCY * latency, _NOTICEABLE_LATENCY)
    return [p for p in pairs if p.bandwidth < _SLOW_BANDWIDTH * bandwidth or p.latency > most]


def _slow_finding(slow: Sequence[Pair], pairs: Sequence[Pair], hosts: Sequence[str], name: str) -> Finding:
    counts = Counter(rank for pair in slow for rank in (pair.source, pair.target))
    rank, times = counts.most_common(1)[0]
    median_ = median(p.bandwidth for p in pairs)
    worst = min(slow, key=lambda pair: pair.bandwidth)
    shown = f"rank {worst.source} to {worst.target}: {time_of(worst.latency)}, {rate(worst.bandwidth)}"
    if times == len(slow) and times > 1:
        what = f"all slow links involve rank {rank} ({hosts[rank]}); {shown}"
        todo = f"check {hosts[rank]}: cable, port, ethtool <interface>, and other processes"
    else:
        names = ", ".join(f"{pair.source}-{pair.target}" for pair in slow[:8])
        what = f"slow pairs: {names}{' ...' if slow[8:] else ''}; {shown}"
        todo = "check what these machines share (switch, cable), and other processes on them"
    return warning(AREA, f"slow pairs {name}", what, f"like the others: {rate(median_)} median", todo)


def _slow_network(pairs: Sequence[Pair], hosts: Sequence[str], speeds: Mapping[str, float]) -> list[Finding]:
    bandwidth = median(pair.bandwidth for pair in pairs)
    known = [speeds[host] for host in {hosts[pair.source] for pair in pairs} if speeds.get(host)]
    expected = max(_LEAST_ACROSS, _SPEED_SHARE * min(known) if known else 0.0)
    if bandwidth >= expected:
        return []
    what = f"{rate(bandwidth)} between machines"
    if known:
        what += f", whose fastest interfaces negotiated {rate(min(known))}"
    todo = f"name the fast interface: export {GLOO}=<interface> and {NCCL}=<interface>; ethtool <interface> shows speed"
    return [warning(AREA, "bandwidth across machines", what, f"at least {rate(expected)}", todo)]


def judge_links(links: Sequence[MeasuredLink]) -> list[Finding]:
    """Report measured all-reduces; pairs are judged instead."""
    return [
        ok(
            AREA,
            f"all-reduce {link.axis}",
            f"{link.ranks} ranks: {time_of(link.latency)} a message, {rate(link.bandwidth)} sent by each",
        )
        for link in links
    ]


def judge_failures(failures: Mapping[int, str], world_size: int) -> list[Finding]:
    """Report ranks that failed.

    Args:
        failures: rank -> its error, or what it was doing at the timeout.
        world_size: number of all ranks.
    """
    if not failures:
        return []
    shown = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())[:4])
    more = f"; and {len(failures) - 4} more" if len(failures) > 4 else ""
    todo = "see the findings on interfaces and host names; firewalls must let ranks connect to each other's ports"
    wanted = f"all {world_size} ranks connected to each other"
    return [error(AREA, "ranks", f"{len(failures)} of {world_size} ranks failed: {shown}{more}", wanted, todo)]


def judge_rendezvous(rank: int, why: str) -> Finding:
    """Return the finding of a rank that failed to reach the rendezvous.

    Args:
        rank: of this process.
        why: error of the store.
    """
    todo = "see the findings on MASTER_ADDR, the host name and interfaces"
    what = f"rank {rank} did not reach the rendezvous: {why}"
    return error(AREA, "rendezvous", what, "an address that all ranks reach", todo)
