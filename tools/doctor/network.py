"""Through which interfaces ranks would speak, and how fast they do."""

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
# Bridges and tunnels of containers and virtual machines: no other machine is reached through them, or slowly.
_VIRTUAL = re.compile(r"docker|br-|veth|virbr|cni|flannel|cali|tunl|podman|lxc|lxd|vnet|ifb|dummy")
# A pair is slow when its bandwidth is this part of the median's, or its latency this many times the median's.
_SLOW_BANDWIDTH, _SLOW_LATENCY, _NOTICEABLE_LATENCY = 1 / 3, 20.0, 1e-3
# Directions between three ranks; with fewer there is no telling which one is slow.
_FEWEST_DIRECTIONS = 6
# Between machines; less is a network for administration, or a link that negotiated 1 Gb/s or less.
_LEAST_ACROSS = 100e6
_SPEED_SHARE = 0.3


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Args:
        name: as ``ip link`` shows it.
        up: whether it is.
        loopback: whether it leads to this machine alone.
        address: IPv4; empty: none.
        speed: bytes per second that it negotiated; ``None``: it does not say.
    """

    name: str
    up: bool
    loopback: bool = False
    address: str = ""
    speed: float | None = None

    @property
    def virtual(self) -> bool:
        """Whether it is one of containers or virtual machines, by its name."""
        return _VIRTUAL.match(self.name) is not None


@dataclass(frozen=True)
class NetworkFacts:
    """Of one machine.

    Args:
        host: its name.
        addresses: that the name resolves to; empty: to none.
        interfaces: all.
        variables: of the environment, of those that choose interfaces and the place to meet.
        master: addresses that ``MASTER_ADDR`` resolves to.
    """

    host: str
    addresses: Sequence[str] = ()
    interfaces: Sequence[Interface] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    master: Sequence[str] = ()


@dataclass(frozen=True)
class Pair:
    """What one rank sends another.

    Args:
        source: rank.
        target: rank.
        latency: seconds of a small message, one way.
        bandwidth: bytes per second.
    """

    source: int
    target: int
    latency: float
    bandwidth: float


# ---------------------------------------------------------------------------------------------------------------------
# Facts


def network_facts() -> NetworkFacts:
    """Of this machine."""
    host = socket.gethostname()
    variables = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    master = _resolve(variables[MASTER]) if MASTER in variables else []
    return NetworkFacts(host, _resolve(host), interfaces(), variables, master)


def _resolve(name: str) -> list[str]:
    try:
        return sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def interfaces(root: Path = Path("/sys/class/net")) -> list[Interface]:
    """Those of this machine."""
    found = []
    for _, name in socket.if_nameindex():
        flags = int(_text(root / name / "flags") or "0", 16)
        speed = _text(root / name / "speed")
        # Megabits; -1 where there is no cable, or nothing like one.
        bytes_per_second = int(speed) * 1e6 / 8 if speed.isdecimal() else None
        found.append(Interface(name, bool(flags & 0x1), bool(flags & 0x8), address_of(name), bytes_per_second))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------------------------------
# Judgements: where ranks would speak


def chosen_interfaces(variable: str, value: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """Interfaces that a variable chooses.

    Args:
        variable: of gloo, which takes names between commas; of NCCL, which takes beginnings of names, ``=`` before
            whole ones and ``^`` before those to leave out.
        value: of the variable.
        interfaces: of the machine.
    """
    if variable == GLOO:
        names = [name.strip() for name in value.split(",")]
        return [each for each in interfaces if each.name in names]
    leaves_out, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = [name.strip() for name in value.lstrip("^=").split(",") if name.strip()]
    return [each for each in interfaces if leaves_out != any(_is_meant(each.name, name, exact) for name in names)]


def _is_meant(name: str, given: str, exact: bool) -> bool:
    return name == given if exact else name.startswith(given)


def judge_network(facts: NetworkFacts, hosts: int, on_gpu: bool = False) -> list[Finding]:
    """The interfaces that the environment chooses, and what names stand for.

    Args:
        facts: of one machine.
        hosts: machines of the run.
        on_gpu: whether ranks compute on GPUs, and so use NCCL.
    """
    found = [
        *(each for name in (GLOO, NCCL) for each in _variable(name, facts, hosts)),
        *_missing_variable(facts, hosts, on_gpu),
        *_name(facts, hosts),
        *_master(facts, hosts),
    ]
    usable = ", ".join(f"{each.name} {each.address}" for each in _usable(facts)) or "none that leads to other machines"
    return [*found, ok(AREA, "interfaces", usable)]


def _usable(facts: NetworkFacts) -> list[Interface]:
    return [each for each in facts.interfaces if each.up and each.address and not each.loopback and not each.virtual]


def _suggestion(variable: str, facts: NetworkFacts) -> str:
    names = [each.name for each in _usable(facts)]
    if not names:
        return f"unset {variable}, and give the machine an address that the others reach (ip addr shows what it has)"
    more = f" (or {', '.join(names[1:])})" if names[1:] else ""
    return f"export {variable}={names[0]}{more}, or unset {variable}"


def _variable(variable: str, facts: NetworkFacts, hosts: int) -> list[Finding]:
    value = facts.variables.get(variable)
    if value is None:
        return []
    chosen, todo = chosen_interfaces(variable, value, facts.interfaces), _suggestion(variable, facts)
    there = ", ".join(each.name for each in facts.interfaces)
    given = f"{variable}={value}"
    missing = []
    if variable == GLOO:
        missing = [name for name in map(str.strip, value.split(",")) if name not in {i.name for i in facts.interfaces}]
    if missing or not chosen:
        what = f"{given}: there is no interface {', '.join(missing) or value} (there are: {there})"
        return [error(AREA, variable, what, "the name of an interface that is up", todo)]
    down = [each.name for each in chosen if not each.up or not each.address]
    if len(down) == len(chosen) or (down and variable == GLOO):
        what = f"{given}: {', '.join(down)} is down or has no address"
        return [error(AREA, variable, what, "an interface that is up", todo)]
    live = [each for each in chosen if each.up and each.address]
    if hosts > 1 and all(each.loopback for each in live):
        what = f"{given}: {', '.join(each.name for each in live)} leads to this machine alone"
        return [error(AREA, variable, what, f"an interface that the other {hosts - 1} machines reach", todo)]
    if any(each.virtual for each in live):
        names = ", ".join(each.name for each in live if each.virtual)
        what = f"{given}: {names} is a bridge of containers or virtual machines"
        judge = error if hosts > 1 and all(each.virtual or each.loopback for each in live) else warning
        return [judge(AREA, variable, what, "a network card", todo)]
    return [ok(AREA, variable, f"{given}: " + ", ".join(f"{each.name} {each.address}" for each in live))]


def _missing_variable(facts: NetworkFacts, hosts: int, on_gpu: bool) -> list[Finding]:
    """Without a variable gloo takes the address of the machine's name, and NCCL the first interface that it finds."""
    if hosts == 1:
        return []
    by_address = {each.address: each for each in facts.interfaces if each.address}
    found = []
    taken = next((by_address[address] for address in facts.addresses if address in by_address), None)
    if GLOO not in facts.variables and taken is not None and taken.virtual:
        what = f"gloo would use {taken.name}, to which the name {facts.host} leads"
        found.append(warning(AREA, GLOO, what, "a network card", _suggestion(GLOO, facts)))
    if on_gpu and NCCL not in facts.variables and len(_usable(facts)) > 1:
        names = ", ".join(f"{each.name} {each.address}" for each in _usable(facts))
        what = f"several interfaces, of which NCCL takes the first for its sockets: {names}"
        found.append(warning(AREA, NCCL, what, "the fastest one by name", _suggestion(NCCL, facts)))
    return found


def _name(facts: NetworkFacts, hosts: int) -> list[Finding]:
    check, names = "host name", f"{facts.host} resolves to {', '.join(facts.addresses) or 'no address'}"
    addresses = [each.address for each in _usable(facts)]
    line = f"write '{addresses[0] if addresses else '<its address>'} {facts.host}' into /etc/hosts"
    if GLOO in facts.variables or hosts == 1:  # the ranks of one machine get the loopback interface
        return [ok(AREA, check, names)]
    if not facts.addresses:
        return [error(AREA, check, names, "its address in the network of the others", line)]
    if all(_is_loopback(address) for address in facts.addresses):
        what = f"{names}: gloo would tell the other machines to look for this one at their own"
        todo = f"{line}, or {_suggestion(GLOO, facts).split(', or unset')[0]}"
        return [error(AREA, check, what, "its address in the network of the others", todo)]
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
    return [error(AREA, MASTER, what, "the first machine's address, as every machine reaches it", todo)]


# ---------------------------------------------------------------------------------------------------------------------
# Judgements: how fast


def judge_pairs(
    pairs: Sequence[Pair], hosts: Sequence[str], speeds: Mapping[str, float] | None = None, rounds: str = ""
) -> list[Finding]:
    """Pairs of ranks that are slower than the others, and a network that is slower than it should be.

    Args:
        pairs: measured.
        hosts: of each rank.
        speeds: host -> bytes per second of its fastest usable interface.
        rounds: what is to be said of pairs that were left out.
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
        what = f"everything to or from rank {rank} ({hosts[rank]}) that is slow has it in common; {shown}"
        todo = f"look at {hosts[rank]}: cable, port, ethtool <interface>, and what else runs there"
    else:
        names = ", ".join(f"{pair.source}-{pair.target}" for pair in slow[:8])
        what = f"slow pairs: {names}{' ...' if slow[8:] else ''}; {shown}"
        todo = "look at what these machines have in common (switch, cable), and what else runs there"
    return warning(AREA, f"slow pairs {name}", what, f"like the others: {rate(median_)} in the median", todo)


def _slow_network(pairs: Sequence[Pair], hosts: Sequence[str], speeds: Mapping[str, float]) -> list[Finding]:
    bandwidth = median(pair.bandwidth for pair in pairs)
    known = [speeds[host] for host in {hosts[pair.source] for pair in pairs} if speeds.get(host)]
    expected = max(_LEAST_ACROSS, _SPEED_SHARE * min(known) if known else 0.0)
    if bandwidth >= expected:
        return []
    what = f"{rate(bandwidth)} between machines"
    if known:
        what += f", whose fastest interfaces are told to do {rate(min(known))}"
    todo = f"name the fast interface: export {GLOO}=<interface> and {NCCL}=<interface>; ethtool <interface> shows speed"
    return [warning(AREA, "bandwidth across machines", what, f"at least {rate(expected)}", todo)]


def judge_links(links: Sequence[MeasuredLink]) -> list[Finding]:
    """What all-reduces reach; judged against nothing, since pairs were."""
    return [
        ok(
            AREA,
            f"all-reduce {link.axis}",
            f"{link.ranks} ranks: {time_of(link.latency)} a message, {rate(link.bandwidth)} sent by each",
        )
        for link in links
    ]


def judge_meeting(failures: Mapping[int, str], world_size: int) -> list[Finding]:
    """Ranks that did not do what they were asked.

    Args:
        failures: rank -> what it said, or where it was when the time was over.
        world_size: all ranks.
    """
    if not failures:
        return []
    shown = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())[:4])
    more = f"; and {len(failures) - 4} more" if len(failures) > 4 else ""
    todo = "see what is said of interfaces and host names here; a firewall must let ranks connect to each other's ports"
    wanted = f"that all {world_size} ranks connect to each other and answer"
    return [error(AREA, "ranks", f"{len(failures)} of {world_size} ranks failed: {shown}{more}", wanted, todo)]


def judge_not_met(rank: int, why: str) -> Finding:
    """Return the finding of a rank that has not reached the others.

    Args:
        rank: of this process.
        why: what the store said.
    """
    todo = "see what is said of MASTER_ADDR, the host name and interfaces"
    what = f"rank {rank} has not met the others: {why}"
    return error(AREA, "meeting", what, "a place that all ranks reach", todo)
