"""docs/gpu.md: what has run on a GPU, from a record of ``python -m benchmarks.gpu``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
_HEAD = """# What has run on GPUs

`make gpu` tries every layout on this machine's GPUs and writes this page; `DEVICE=cpu` tries it out without one.
Recorded {date} on one {device}, torch {torch} (CUDA {cuda}, NCCL {nccl}), Lightning {lightning}.
"""
_RUNS = """
## Commands over NCCL

`trainwright fit recipe=gpt size=nano` on one rank, and on all GPUs if there are several; eight steps of the same
samples. The last loss must be that of the CPU within 1e-4, in mixed precision within 2 %, where a run begins with the
same weights and makes the same steps.

"""
_ZOO = """
## Ranks that share a GPU

NCCL refuses two ranks of a GPU, so gloo carries their tensors; as under NCCL, groups take no tensors of the CPU.
Lightning on one process on the same GPU is the reference.

"""
_PACKED = """
## Packed documents

A step of a Llama in bf16 on a row of 16,384 tokens, documents of 2,048 (`python -m benchmarks.packed`).

"""
_PEERS = """
## Speed

GPT in bf16 with compiled blocks and flash attention (`python -m benchmarks.peers.gpu`); one side at a time.

"""


def newest(folder: Path) -> dict[str, Any]:
    """Return the last record of a GPU."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("gpu_*.json"))]
    found: dict[str, Any] = max((each for each in records if each["cuda"]), key=lambda each: each["date"])
    return found


def page(result: Mapping[str, Any]) -> str:
    """Return the page as text."""
    return "".join(_parts(result))


def _parts(result: Mapping[str, Any]) -> Iterator[str]:
    yield _HEAD.format(**{**result, **result["versions"]})
    yield from (f"\n{note}\n" for note in result["notes"])
    yield _RUNS
    yield from _runs(result["runs"])
    yield _ZOO
    by_layout: dict[str, Counter[str]] = {}
    for cell, outcome in result["zoo"]["cells"].items():
        by_layout.setdefault(cell.rpartition(" | ")[2], Counter())[outcome.partition(":")[0]] += 1
    kinds = [kind for kind in ("equal", "refused", "wrong", "no reference") if result["zoo"]["counts"].get(kind)]
    yield _table(
        ("zoo, by layout", *kinds),
        [(layout, *(str(found[kind]) for kind in kinds)) for layout, found in sorted(by_layout.items())],
    )
    others = {cell: text for cell, text in result["zoo"]["cells"].items() if text.startswith(("wrong", "no ref"))}
    yield from (f"\n- {cell.replace(' | ', ', ')}: {text[:160]}" for cell, text in others.items())
    yield "\n" if others else ""
    tests = result["tests"]
    failed = f", {len(tests['failed'])} failed: {', '.join(tests['failed'])}" if tests["failed"] else ""
    yield f"\n{tests['ran']} tests of ranks (parity, resume, local updates) ran{failed}.\n"
    yield _PACKED
    yield _table(
        ("attention", "step, ms", "MiB"),
        [(row["side"], _number(row["ms"], 1), _number(row["MiB"], 0)) for row in result["packed"]],
    )
    yield _PEERS
    yield _table(
        ("size", "layout", "side", "tokens/s", "MFU", "GiB", "step, ms"),
        [
            (
                row["size"],
                row["layout"],
                row["side"],
                row["error"] or f"{row['tokens_per_s']:,}",
                _number(row["mfu"], 1, 0.01) and f"{_number(row['mfu'], 1, 0.01)} %",
                _number(row["gib"], 1),
                _number(row["step_ms"], 1),
            )
            for row in result["peers"]
        ],
    )


def _runs(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the runs by their last loss, those that failed, and bytes on the device between steps."""
    by_loss: dict[str, list[str]] = {}
    for run in runs:
        loss = "" if run["loss"] is None else f"loss {_number(run['loss'], 3)}"
        by_loss.setdefault(run["error"] or loss or "no loss", []).append(run["name"])
    yield from (f"- {outcome}: {'; '.join(names)}\n" for outcome, names in by_loss.items())
    by_state: dict[str, list[str]] = {}
    for run in runs:
        if run["state"]:
            by_state.setdefault(f"{_number(run['state'], 1, 2**20)} MiB", []).append(run["name"])
    most = max(by_state.values(), key=len, default=[])
    states = [f"{size} ({'most' if names is most else '; '.join(names)})" for size, names in by_state.items()]
    yield f"\nOn the device between steps: {', '.join(states)}.\n" if states else ""


def _number(value: float | None, digits: int, unit: float = 1) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
