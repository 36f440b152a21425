"""A profile of devices and links from what ranks measured, as a yaml of the group `device`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainwright.strategies.contract.communication.advice import MeasuredLink
from trainwright.tools.doctor.together import Seen

_CPU = "cpu"
_DIGITS = 4
_NUMBERS = ("memory_bandwidth", "efficiency", "host_bandwidth")


def profile_of(seen: Seen, name: str) -> tuple[dict[str, Any], list[str]]:
    """Values of the group ``device``: of each figure the median of the ranks, of memory the least.

    Args:
        seen: with figures of all ranks.
        name: of the profile.

    Returns:
        The values (bytes, seconds, FLOP/s, bytes/s), and what is to be said of them.
    """
    figures = [result.figures for result in seen.results]
    flops = {kind: median(each["flops"][kind] for each in figures) for kind in figures[0]["flops"]}
    within, across, notes = _links(seen, figures)
    middle = {key: median(each[key] for each in figures) for key in _NUMBERS}
    return {
        # By its name a planner knows that ranks compute on cores, in the memory of the host.
        "name": name if seen.on_gpu or _CPU in name.lower() else f"{name}_{_CPU}",
        "memory_bytes": min(each["memory_bytes"] for each in figures),
        "flops": {kind: _rounded(value) for kind, value in flops.items()},
        "memory_bandwidth": _rounded(middle["memory_bandwidth"]),
        "efficiency": _rounded(middle["efficiency"]),
        "devices_per_node": seen.local_size,
        "within": within,
        "across": across,
        "host_bandwidth": _rounded(middle["host_bandwidth"]),
        "host_memory_bytes": min(each["host_memory_bytes"] for each in figures),
        "operation_seconds": _rounded(median(each["operation_seconds"] for each in figures)),
        "gather_seconds": _rounded(median(each.get("gather_seconds", 0.0) for each in figures)),
        "share": 1.0 if seen.on_gpu else _rounded(min(1.0, figures[0]["cores"] / seen.local_size)),
        "measured_on": figures[0]["measured_on"],
    }, [f"{figures[0]['device_name']}, measured on {', '.join(seen.hosts)} with {len(figures)} ranks.", *notes]


def _links(seen: Seen, figures: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float], list[str]]:
    links = {link.axis: link for link in seen.results[0].links}
    machines = len(seen.results) // seen.local_size
    notes = []
    way = {"latency": figures[0]["host_latency"], "bandwidth": median(each["host_bandwidth"] for each in figures)}
    if seen.local_size > 1:
        within = _with_calls(links["within" if machines > 1 else "all"], links.get("pair"))
    else:
        within = {key: _rounded(value) for key, value in way.items()}
        notes.append(
            "within: not measured, since there was one rank on a machine; what it costs to reach the host's memory, "
            "which is the least. Measure with devices=2 or more."
        )
    if machines > 1:
        across = _of(links["across" if seen.local_size > 1 else "all"])
    else:
        across = dict(within)
        notes.append(
            "across: not measured, since there was one machine; the same as within. Measure under torchrun with "
            "several machines, or write your network's figures here."
        )
    return within, across, notes


def _with_calls(link: MeasuredLink, pair: MeasuredLink | None) -> dict[str, float]:
    """What a message costs and what a collective, by how much longer an all-reduce of more ranks takes than of two.

    One of n ranks takes ``call + 2 (n - 1) latency``; both are known from two n. From one alone, all is in the latency.
    """
    if pair is None or link.ranks <= pair.ranks:
        return _of(link)
    all_of_it, of_pair = (2 * (each.ranks - 1) * each.latency for each in (link, pair))
    latency = max(all_of_it - of_pair, 0.0) / (2 * (link.ranks - pair.ranks))
    call = max(all_of_it - 2 * (link.ranks - 1) * latency, 0.0)
    return {**_of(link), "latency": _rounded(latency), "call": _rounded(call)}


def _of(link: MeasuredLink) -> dict[str, float]:
    return {"latency": _rounded(link.latency), "bandwidth": _rounded(link.bandwidth)}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def to_yaml(values: Mapping[str, Any], notes: Sequence[str]) -> str:
    """The text of the file; the first note is what `--help` says of the choice.

    Args:
        values: as :func:`profile_of` returns them.
        notes: lines of comment.
    """
    document: str = yaml.safe_dump(dict(values), sort_keys=False)
    return "".join(f"# {note}\n" for note in notes) + document
