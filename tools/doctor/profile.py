"""Device profile from the measurements of ranks, as a yaml of the group `device`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainwright.strategies.contract.communication.advice import MeasuredLink
from trainwright.tools.doctor.examination import Examination

Figures = dict[str, float]

_CPU = "cpu"
_DIGITS = 4
_NUMBERS = ("memory_bandwidth", "efficiency", "host_bandwidth")


def profile_of(examination: Examination, name: str) -> tuple[dict[str, Any], list[str]]:
    """Return a profile: the median of each figure over ranks, the minimum of memory sizes.

    Args:
        examination: with figures of all ranks.
        name: of the profile.

    Returns:
        The values (bytes, seconds, FLOP/s, bytes/s), and notes for the file's comments.
    """
    figures = [result.figures for result in examination.results]
    flops = {kind: median(each["flops"][kind] for each in figures) for kind in figures[0]["flops"]}
    within, across, notes = _links(examination, figures)
    middle = {key: median(each[key] for each in figures) for key in _NUMBERS}
    return {
        # The planner recognizes CPU profiles by their names.
        "name": name if examination.on_gpu or _CPU in name.lower() else f"{name}_{_CPU}",
        "memory_bytes": min(each["memory_bytes"] for each in figures),
        "flops": {kind: _rounded(value) for kind, value in flops.items()},
        "memory_bandwidth": _rounded(middle["memory_bandwidth"]),
        "efficiency": _rounded(middle["efficiency"]),
        "devices_per_node": examination.local_size,
        "within": within,
        "across": across,
        "host_bandwidth": _rounded(middle["host_bandwidth"]),
        "host_memory_bytes": min(each["host_memory_bytes"] for each in figures),
        "operation_seconds": _rounded(median(each["operation_seconds"] for each in figures)),
        "gather_seconds": _rounded(median(each.get("gather_seconds", 0.0) for each in figures)),
        "share": 1.0 if examination.on_gpu else _rounded(min(1.0, figures[0]["cores"] / examination.local_size)),
        "measured_on": figures[0]["measured_on"],
    }, [f"{figures[0]['device_name']}, measured on {', '.join(examination.hosts)} with {len(figures)} ranks.", *notes]


def _links(examination: Examination, figures: Sequence[Mapping[str, Any]]) -> tuple[Figures, Figures, list[str]]:
    links = {link.axis: link for link in examination.results[0].links}
    machines = len(examination.results) // examination.local_size
    notes = []
    host_copy = {"latency": figures[0]["host_latency"], "bandwidth": median(each["host_bandwidth"] for each in figures)}
    if examination.local_size > 1:
        within = _with_calls(links["within" if machines > 1 else "all"], links.get("pair"))
    else:
        within = {key: _rounded(value) for key, value in host_copy.items()}
        notes.append(
            "within: not measured with one rank per machine; the figures are those of copies to host memory, "
            "a lower bound. Measure with devices=2 or more."
        )
    if machines > 1:
        across = _figures_of(links["across" if examination.local_size > 1 else "all"])
    else:
        across = dict(within)
        notes.append(
            "across: not measured on one machine; the same as within. Measure under torchrun with "
            "several machines, or enter the figures of your network."
        )
    return within, across, notes


def _with_calls(link: MeasuredLink, pair: MeasuredLink | None) -> Figures:
    """Split the cost of an all-reduce into that of a message and that of a call.

    An all-reduce of n ranks takes ``call + 2 (n - 1) latency``; two values of n determine both.
    """
    if pair is None or link.ranks <= pair.ranks:
        return _figures_of(link)
    all_ranks, of_pair = (2 * (each.ranks - 1) * each.latency for each in (link, pair))
    latency = max(all_ranks - of_pair, 0.0) / (2 * (link.ranks - pair.ranks))
    call = max(all_ranks - 2 * (link.ranks - 1) * latency, 0.0)
    return {**_figures_of(link), "latency": _rounded(latency), "call": _rounded(call)}


def _figures_of(link: MeasuredLink) -> Figures:
    return {"latency": _rounded(link.latency), "bandwidth": _rounded(link.bandwidth)}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def to_yaml(values: Mapping[str, Any], notes: Sequence[str]) -> str:
    """Return the text of the file; the first note is shown by `--help`.

    Args:
        values: as returned by :func:`profile_of`.
        notes: lines of comment.
    """
    document: str = yaml.safe_dump(dict(values), sort_keys=False)
    return "".join(f"# {note}\n" for note in notes) + document
