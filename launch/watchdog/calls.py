"""Collective calls of this process, from torch's flight recorder."""

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Calls recorded by each process; older ones are overwritten.
_MAX_RECORDED = 2000
# Calls in an answer, besides all that are pending.
_MAX_IN_ANSWER = 400


@dataclass(frozen=True)
class Call:
    """One collective call of one rank.

    Attributes:
        group: name of the process group.
        number: earlier calls of the group; the same on every rank that is in step.
        name: such as ``all_reduce``.
        sizes: of its inputs.
        kinds: their types, such as ``float32``.
        pending: whether it is not complete.
        seconds: since its start.
    """

    group: str
    number: int
    name: str
    sizes: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]
    pending: bool
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} #{self.number}{self.what}"

    @property
    def what(self) -> str:
        """Its payload, such as `` (512 x float32)``; empty for a barrier."""
        counts = [math.prod(size) for size in self.sizes]
        if not counts:
            return ""
        kinds = sorted(set(self.kinds))
        extent = f"{sum(counts):,} x {' and '.join(kinds)}" if kinds else f"{sum(counts):,} elements"
        return f" ({extent}{f' in {len(counts)} tensors' if len(counts) > 1 else ''})"


@dataclass(frozen=True)
class Group:
    """A process group.

    Attributes:
        name: unique in the run.
        label: for reports.
        ranks: global ranks.
    """

    name: str
    label: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"group {self.label!r} {list(self.ranks)}"


def record_calls() -> None:
    """Make torch record the calls of this process, unless the user decided otherwise. Must precede the process group;
    newer versions of torch do so by default.
    """
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name, which the newer one would override
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_MAX_RECORDED))


def set_trace_folder(folder: Path) -> None:
    """Make NCCL's own watchdog, if it fires first, write its trace into `folder` instead of ``/tmp``."""
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "nccl_trace_rank_"))


def own_calls() -> list[Call]:
    """Return the last calls of this process, oldest first; empty if torch does not record them."""
    if not _has_groups():
        return []
    from trainwright.core.torch_internals import _distributed_c10d

    entries: list[dict[str, Any]] = []
    # NCCL's calls are recorded separately.
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries", [])
    entries.sort(key=lambda entry: entry["time_created_ns"])
    now = time.time_ns()
    calls = [_call(entry, now) for entry in entries]
    old = max(0, len(calls) - _MAX_IN_ANSWER)
    return [call for call in calls[:old] if call.pending] + calls[old:]


def own_groups() -> dict[str, Group]:
    """Return the process groups of this process by name."""
    if not _has_groups():
        return {}
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    found: dict[str, Group] = {}
    # A copy, because the main thread may be creating a group.
    for group, name in list(world.pg_names.items()):
        ranks = tuple(sorted(world.pg_group_ranks.get(group, {})))
        found[name] = Group(name, _label(name, getattr(group, "group_desc", "")), ranks)
    return found


def _has_groups() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _call(entry: dict[str, Any], now: int) -> Call:
    name = str(entry.get("profiling_name", "")).rpartition(":")[2] or "a call"
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    return Call(
        group=str(entry["process_group"][0]),
        number=int(number),
        name=name,
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        kinds=tuple(_DTYPES.get(kind, kind.lower()) for kind in entry["input_dtypes"]),
        pending=not entry["retired"] and entry["state"] != "completed",
        seconds=max(0, now - entry["time_created_ns"]) / 1e9,
    )


def _label(name: str, description: str) -> str:
    plain = {"default_pg": "all ranks", "": name, "undefined": name}
    return plain.get(description, description.removeprefix("mesh_"))


_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16",
    "Char": "int8", "Byte": "uint8",
}  # fmt: skip
