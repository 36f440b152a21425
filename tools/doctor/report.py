"""All findings of a look around, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from trainwright.tools.doctor import clocks, devices, libraries, limits, machine, network
from trainwright.tools.doctor.collect import IMPORT_SECONDS, HostFacts
from trainwright.tools.doctor.finding import ERROR, OK, STATES, WARNING, Finding, error
from trainwright.tools.doctor.limits import Demand
from trainwright.tools.doctor.together import Seen

AREAS = (machine.AREA, devices.AREA, libraries.AREA, network.AREA, clocks.AREA, limits.AREA)
_MARKS = {OK: "ok     ", WARNING: "warning", ERROR: "ERROR  "}


def judge(seen: Seen, accelerator: str = "auto", workers: int = 0) -> list[Finding]:
    """Everything that can be said of what was seen, area by area.

    Args:
        seen: facts and results.
        accelerator: that the run would use.
        workers: of the data loaders of one rank.
    """
    world_size = len(seen.results) or seen.local_size
    names = dict.fromkeys(result.host for result in seen.results if result.host)
    hosts = max(len(names), len(seen.hosts), seen.machines)
    demand = Demand(seen.local_size, world_size, workers, seen.threads, seen.on_gpu, hosts)
    by_host = {host: _of_host(facts, demand, accelerator) for host, facts in seen.hosts.items()}
    found = _merged(by_host)
    found += [
        *libraries.judge_same({host: f.libraries for host, f in seen.hosts.items() if f.libraries is not None}),
        *devices.judge_same_nccl({host: f.devices for host, f in seen.hosts.items() if f.devices is not None}),
        *_of_ranks(seen, world_size),
        *(_silent(host) for host in names if host not in seen.hosts),
    ]
    return sorted(found, key=lambda each: AREAS.index(each.area))


def _of_host(facts: HostFacts, demand: Demand, accelerator: str) -> list[Finding]:
    found = [_unanswered(name, why) for name, why in facts.unanswered.items() if name != "import_seconds"]
    free = None if facts.run_dir is None else facts.run_dir.free
    memory = 0 if facts.machine is None else facts.machine.memory
    judges: list[tuple[object, Callable[..., list[Finding]], tuple[object, ...]]] = [
        (facts.machine, machine.judge_machine, (demand,)),
        (facts.devices, devices.judge_devices, (demand, accelerator)),
        (facts.libraries, libraries.judge_libraries, ()),
        (facts.network, network.judge_network, (demand.hosts, demand.on_gpu)),
        (facts.limits, limits.judge_limits, (demand, free, memory)),
        (facts.shared_memory, limits.judge_shared_memory, (demand,)),
        (facts.run_dir, limits.judge_run_dir, ()),
        (facts.tmp, limits.judge_tmp, ()),
    ]
    for known, judgement, more in judges:
        if known is not None:
            found += judgement(known, *more)
    return [*found, *machine.judge_import(facts.import_seconds, IMPORT_SECONDS, facts.unanswered.get("import_seconds"))]


_AREA_OF = {
    "machine": machine.AREA,
    "devices": devices.AREA,
    "libraries": libraries.AREA,
    "network": network.AREA,
    "limits": limits.AREA,
    "run_dir": limits.AREA,
    "tmp": limits.AREA,
    "shared_memory": limits.AREA,
}


def _unanswered(name: str, why: str) -> Finding:
    todo = {
        "run_dir": "look at the file system of run_dir= (a network file system that does not answer?)",
        "tmp": "look at the file system of TMPDIR",
        "network": "look at the name server: getent hosts $(hostname) must answer at once",
        "devices": "look at the driver: nvidia-smi must answer",
    }.get(name, "look at the machine: /proc and /sys must answer")
    return error(_AREA_OF[name], f"{name.replace('_', ' ')} answers", why, "an answer", todo)


def _silent(host: str) -> Finding:
    return error(
        machine.AREA, "facts", f"{host} has ranks, and has not told about itself", "its facts", f"run doctor on {host}"
    )


def _merged(by_host: dict[str, list[Finding]]) -> list[Finding]:
    """What is true of all machines once; else with the machines of which it is true."""
    where: dict[Finding, list[str]] = {}
    for host, findings in by_host.items():
        for finding in findings:
            where.setdefault(finding, []).append(host)
    return [
        finding if len(hosts) == len(by_host) else replace(finding, where=", ".join(hosts))
        for finding, hosts in where.items()
    ]


def _of_ranks(seen: Seen, world_size: int) -> list[Finding]:
    failures = {result.rank: result.failure for result in seen.results if result.failure is not None}
    first = next((facts.network for facts in seen.hosts.values()), None)
    found = network.judge_meeting(failures, world_size, first)
    names = [result.host for result in seen.results]
    offsets = [result.offset for result in seen.results if result.offset is not None]
    pairs = [pair for result in seen.results for pair in result.pairs]
    done, all_rounds = next((result.rounds for result in seen.results if result.pairs), (0, 0))
    left_out = f"; {done} of {all_rounds} rounds of pairs were measured" if done < all_rounds else ""
    speeds = {
        host: max((each.speed or 0.0 for each in facts.network.interfaces if each.up), default=0.0)
        for host, facts in seen.hosts.items()
        if facts.network is not None
    }
    found += clocks.judge_clocks(offsets, names)
    found += network.judge_pairs(pairs, names, speeds, left_out)
    found += network.judge_links(next((result.links for result in seen.results if result.links), []))
    return found


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    """How many findings there are of each state."""
    return {state: sum(finding.state == state for finding in findings) for state in STATES}


def to_json(findings: Sequence[Finding], seen: Seen) -> str:
    """One document: the ranks and hosts that were looked at, the counts, and every finding."""
    document = {
        "hosts": list(seen.hosts),
        "ranks": len(seen.results),
        "counts": counts(findings),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(document, allow_nan=False)


def to_text(findings: Sequence[Finding], seen: Seen) -> str:
    """For people: one line for each finding, and below those that are not ok what to do."""
    what = "GPUs" if seen.on_gpu else "the CPU"
    lines = [f"doctor: {len(seen.results)} ranks on {what} of {', '.join(seen.hosts) or 'no machine'}"]
    for area in AREAS:
        of_area = [finding for finding in findings if finding.area == area]
        if of_area:
            lines += ["", area]
        for finding in of_area:
            where = f" [{finding.where}]" if finding.where else ""
            lines.append(f"  {_MARKS[finding.state]}  {finding.check}{where}: {finding.found}")
            if finding.state != OK:
                lines += [f"           wanted: {finding.wanted}", f"           do:     {finding.todo}"]
    number = counts(findings)
    lines += ["", f"{number[ERROR]} errors, {number[WARNING]} warnings, {number[OK]} ok"]
    return "\n".join(lines) + "\n"
