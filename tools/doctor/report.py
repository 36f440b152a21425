"""Doctor report over all machines and ranks, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from trainwright.tools.doctor import clocks, folders, machine, network
from trainwright.tools.doctor.collect import HostReport
from trainwright.tools.doctor.environment import DEVICES, LIBRARIES, environment_lines, judge_same
from trainwright.tools.doctor.examination import Examination
from trainwright.tools.doctor.finding import ERROR, OK, STATES, WARNING, Finding, error

AREAS = (machine.AREA, DEVICES, LIBRARIES, network.AREA, clocks.AREA, folders.AREA)
_MARKS = {OK: "ok     ", WARNING: "warning", ERROR: "ERROR  "}


def judge(examination: Examination) -> list[Finding]:
    """Return all findings, ordered by area.

    Args:
        examination: reports of machines and results of ranks.
    """
    names = dict.fromkeys(result.host for result in examination.results if result.host)
    found = [
        *_merge(examination.hosts),
        *judge_same({host: report.versions for host, report in examination.hosts.items()}),
        *_rank_findings(examination),
        *(_missing_report(host) for host in names if host not in examination.hosts),
    ]
    return sorted(found, key=lambda each: AREAS.index(each.area))


def _missing_report(host: str) -> Finding:
    what, todo = f"{host} has ranks but sent no report", f"run doctor on {host}"
    return error(machine.AREA, "facts", what, "its report", todo)


def _merge(hosts: Mapping[str, HostReport]) -> list[Finding]:
    """Merge equal findings; those that not all machines share name their machines."""
    where: dict[Finding, list[str]] = {}
    for host, report in hosts.items():
        for finding in report.findings:
            where.setdefault(finding, []).append(host)
    return [
        finding if len(some) == len(hosts) else replace(finding, where=", ".join(some))
        for finding, some in where.items()
    ]


def _rank_findings(examination: Examination) -> list[Finding]:
    results = examination.results
    failures = {result.rank: result.failure for result in results if result.failure is not None}
    names = [result.host for result in results]
    done, all_rounds = next((result.rounds for result in results if result.pairs), (0, 0))
    left_out = f"; {done} of {all_rounds} rounds of pairs were measured" if done < all_rounds else ""
    speeds = {host: report.speed for host, report in examination.hosts.items()}
    return [
        *network.judge_failures(failures, len(results)),
        *clocks.judge_clocks([result.offset for result in results if result.offset is not None], names),
        *network.judge_pairs([pair for result in results for pair in result.pairs], names, speeds, left_out),
        *network.judge_links(next((result.links for result in results if result.links), [])),
    ]


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    """Count findings by state."""
    return {state: sum(finding.state == state for finding in findings) for state in STATES}


def to_json(findings: Sequence[Finding], examination: Examination) -> str:
    """Return one JSON document: hosts, number of ranks, counts, findings, and the environment of each host."""
    document = {
        "hosts": list(examination.hosts),
        "ranks": len(examination.results),
        "counts": counts(findings),
        "findings": [asdict(finding) for finding in findings],
        "environment": {host: report.environment for host, report in examination.hosts.items()},
    }
    return json.dumps(document, allow_nan=False)


def to_text(findings: Sequence[Finding], examination: Examination) -> str:
    """Return the environment of the first host and one line per finding; below problems, the remedy."""
    what = "GPUs" if examination.on_gpu else "the CPU"
    lines = [f"doctor: {len(examination.results)} ranks on {what} of {', '.join(examination.hosts) or 'no machine'}"]
    for host, report in list(examination.hosts.items())[:1]:
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
