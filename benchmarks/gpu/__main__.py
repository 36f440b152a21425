"""Everything that one GPU can show, and several GPUs if there are: ``python -m benchmarks.gpu``, or ``make gpu``.

1. Commands of one rank with NCCL, and of all GPUs if there are several (:mod:`benchmarks.gpu.runs`).
2. The zoo and tests of ranks, on ranks that share one GPU (:mod:`tests.zoo.on_device`).
3. Attention by document beside attention with a mask (:mod:`benchmarks.packed`).
4. Tokens per second, MFU and memory beside torch by hand and Lightning (:mod:`benchmarks.peers.gpu`).

The outcomes are recorded in ``benchmarks/results``, and docs/gpu.md is written from the last record (half an hour on
one GPU). ``--device cpu`` tries it out without a GPU; ``--page`` writes the page alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.gpu.page import PAGE, newest, page
from benchmarks.report import machine, say

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Tests whose ranks can share a GPU. Of others, some compare its numbers with the CPU's bit by bit.
TESTS = (
    "tests/parity/test_strategies.py",
    "tests/parity/test_layouts.py",
    "tests/parity/test_optimizers.py",
    "tests/parity/test_resume.py",
    "tests/strategies/local_updates/test_local_updates.py",
)
_ON_GPU = {"tests": list(TESTS), "sizes": ["125m", "350m", "1b"], "out": RESULTS}
_ON_CPU = {"rows": 12, "tests": list(TESTS[:1]), "sizes": ["nano"], "out": ROOT / "build" / "gpu"}


def main() -> None:
    """Run the parts, record their outcomes and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries it out (default: %(default)s)")
    add("--page", action="store_true", help="only write the page from the last record")
    add("--rows", type=int, help="modules of the zoo (default: those of make test, few without a GPU)")
    add("--tests", nargs="*", help="tests of ranks (default: of parity and local updates, few without a GPU)")
    add("--sizes", nargs="*", help="of the language model (default: 125m 350m 1b, nano without a GPU)")
    add("--only", nargs="+", help="names of commands (default: all)")
    add("--out", type=Path, help="folder of the record (default: benchmarks/results, build/gpu without a GPU)")
    options = parser.parse_args()
    for name, value in (_ON_GPU if options.device == "cuda" else _ON_CPU).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not options.page:
        if options.device == "cuda" and not torch.cuda.is_available():
            parser.error("there is no GPU here; --device cpu tries it out without one")
        record(options)
    if options.out == RESULTS:
        PAGE.write_text(page(newest(RESULTS)), encoding="utf-8")


def record(options: argparse.Namespace) -> None:
    """Run the parts and write ``gpu_DEVICE_DATE.json``."""
    on_gpu = options.device == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    ranks = max(1, torch.cuda.device_count())
    with tempfile.TemporaryDirectory(prefix="trainwright-gpu-") as name:
        folder, where = Path(name), ("--device", options.device)
        only = ("--only", *options.only) if options.only else ()
        notes: list[str] = []
        runs = _json(folder, ["benchmarks.gpu.runs", *where, *only], [], notes)
        if ranks > 1:
            runs += _json(folder, ["benchmarks.gpu.runs", *where, *only, f"--ranks={ranks}"], [], notes)
        rows = () if options.rows is None else (f"--limit={options.rows}",)
        zoo = _json(folder, ["tests.zoo.on_device", *where, *rows], {"counts": {}, "cells": {}}, notes)
        result = {
            "device": device,
            "date": time.strftime("%Y-%m-%d"),
            "versions": {name: version(name) for name in ("torch", "lightning", "transformers")},
            "cuda": torch.version.cuda if on_gpu else None,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
            "machine": machine(),
            "runs": runs,
            "zoo": zoo,
            "tests": _tests(options, folder, notes),
            "packed": _packed(options.device, notes),
            "peers": _peers(options, folder, notes),
            "notes": notes,
        }
    options.out.mkdir(parents=True, exist_ok=True)
    stem = "_".join(["gpu", *device.lower().split(), result["date"].replace("-", "_")])
    file = options.out / f"{stem}.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(f"recorded in {file}")


def _json(folder: Path, command: Sequence[str], nothing: Any, notes: list[str]) -> Any:
    """Return what a module wrote; ``nothing``, and a note, if it ended before."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    _run([*command, f"--out={out}"])
    return json.loads(out.read_text()) if _wrote(out, command[0], notes) else nothing


def _wrote(out: Path, name: str, notes: list[str]) -> bool:
    if not out.exists():
        notes.append(f"`{name}` ended without a result, which is missing here.")
    return out.exists()


def _tests(options: argparse.Namespace, folder: Path, notes: list[str]) -> dict[str, Any]:
    """Run the tests of ranks; return their number and the names of those that failed."""
    if not options.tests:
        return {"ran": 0, "failed": []}
    out = folder / "tests.xml"
    at_once = max(1, (os.cpu_count() or 1) // 2)
    words = ["pytest", "-p", "tests.shared_device", "-q", f"-n={at_once}", "--timeout=120", f"--junitxml={out}"]
    _run([*words, *options.tests], SHARED_DEVICE=options.device, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    cases = list(ElementTree.parse(out).getroot().iter("testcase")) if _wrote(out, "pytest", notes) else []
    wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    failed = [f"{case.get('classname')}.{case.get('name')}" for case in wrong]
    return {"ran": len(cases), "failed": failed}


def _packed(device: str, notes: list[str]) -> list[dict[str, Any]]:
    """Return the rows of attention by document, and with a mask."""
    sizes = ("--tokens=16384", "--document=2048", "--width=1024", "--layers=4") if device == "cuda" else ()
    ended = _run(["benchmarks.packed", f"--device={device}", *sizes], stdout=subprocess.PIPE)
    if ended.returncode:
        notes.append("`benchmarks.packed` ended without a result, which is missing here.")
        return []
    rows: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])["rows"]
    return rows


def _peers(options: argparse.Namespace, folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not options.sizes:
        return []
    out = folder / "peers"
    where = ["--device", options.device, "--out", str(out)]
    _run(["benchmarks.peers.gpu", *where, "--sizes", *options.sizes, "--sides", "Lightning", "trainwright"])
    _wrote(out, "benchmarks.peers.gpu", notes)
    return [row for file in out.glob("*.json") for row in json.loads(file.read_text())["rows"]]


def _run(words: Sequence[str], stdout: int | None = None, **variables: str) -> subprocess.CompletedProcess[bytes]:
    say(" ".join(words))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environment, stdout=stdout, check=False)


if __name__ == "__main__":
    main()
