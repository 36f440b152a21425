"""The findings of all machines and ranks, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from trainwright.tools.doctor import clocks, folders, machine, network
from trainwright.tools.doctor.collect import HostReport
from trainwright.tools.doctor.environment import DEVICES, LIBRARIES, environment_lines, judge_same
from trainwright.tools.doctor.finding import ERROR, OK, STATES, WARNING, Finding, error
from trainwright.tools.doctor.together import Seen

AREAS = (machine.AREA, DEVICES, LIBRARIES, network.AREA, clocks.AREA, folders.AREA)
_MARKS = {OK: "ok     ", WARNING: "warning", ERROR: "ERROR  "}


def judge(seen: Seen) -> list[Finding]:
    """Return all findings, area by area.

    Args:
        seen: reports of machines, and results of ranks.
    """
    names = dict.fromkeys(result.host for result in seen.results if result.host)
    found = [
        *_merged(seen.hosts),
        *judge_same({host: report.versions for host, report in seen.hosts.items()}),
        *_of_ranks(seen),
        *(_silent(host) for host in names if host not in seen.hosts),
    ]
    return sorted(found, key=lambda each: AREAS.index(each.area))


def _silent(host: str) -> Finding:
    what, todo = f"{host} has ranks, and has not reported", f"run doctor on {host}"
    return error(machine.AREA, "facts", what, "its report", todo)


def _merged(hosts: Mapping[str, HostReport]) -> list[Finding]:
    """Return once what is true of all machines; else with the machines of which it is true."""
    where: dict[Finding, list[str]] = {}
    for host, report in hosts.items():
        for finding in report.findings:
            where.setdefault(finding, []).append(host)
    return [
        finding if len(some) == len(hosts) else replace(finding, where=", ".join(some))
        for finding, some in where.items()
    ]


def _of_ranks(seen: Seen) -> list[Finding]:
    results = seen.results
    failures = {result.rank: result.failure for result in results if result.failure is not None}
    names = [result.host for result in results]
    done, all_rounds = next((result.rounds for result in results if result.pairs), (0, 0))
    left_out = f"; {done} of {all_rounds} rounds of pairs were measured" if done < all_rounds else ""
    speeds = {host: report.speed for host, report in seen.hosts.items()}
    return [
        *network.judge_meeting(failures, len(results)),
        *clocks.judge_clocks([result.offset for result in results if result.offset is not None], names),
        *network.judge_pairs([pair for result in results for pair in result.pairs], names, speeds, left_out),
        *network.judge_links(next((result.links for result in results if result.links), [])),
    ]


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    """Return how many findings there are of each state."""
    return {state: sum(finding.state == state for finding in findings) for state in STATES}


def to_json(findings: Sequence[Finding], seen: Seen) -> str:
    """Return one document: hosts, the number of ranks, counts, every finding, and the environment of each host."""
    document = {
        "hosts": list(seen.hosts),
        "ranks": len(seen.results),
        "counts": counts(findings),
        "findings": [asdict(finding) for finding in findings],
        "environment": {host: report.environment for host, report in seen.hosts.items()},
    }
    return json.dumps(document, allow_nan=False)


def to_text(findings: Sequence[Finding], seen: Seen) -> str:
    """Return the environment of the first host, and a line for each finding; below those not ok, what to do."""
    what = "GPUs" if seen.on_gpu else "the CPU"
    lines = [f"doctor: {len(seen.results)} ranks on {what} of {', '.join(seen.hosts) or 'no machine'}"]
    for host, report in list(seen.hosts.items())[:1]:
        lines += ["", f"environment of {host}", *(f"  {line}" for line in environment_lines(report.environment))]
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
