"""Commands that reach the code for GPUs, each with its outcome: ``python -m benchmarks.gpu.runs``.

NCCL, the same small model and samples everywhere. Runs that compute the same in fp32 must end with the
loss of the first one, which trains on the CPU. ``--device cpu`` tries them out without a GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.peers.race import last_error

REFERENCE = "single on the CPU"
# Relative distance of a loss in fp32 from the reference; in 16 bit, of what rounding makes of eight steps.
EXACT, ROUNDED = 1e-4, 2e-2
_SECONDS = 240
# Characters of what a failed run said, from its end.
_KEPT = 6000


@dataclass(frozen=True)
class Run:
    """A command.

    Args:
        name: of the run; also of its folder.
        words: after ``trainwright``; those of ``fit`` come after :data:`_FIT`.
        verb: of the command.
        within: relative distance of the loss from that of :data:`REFERENCE`; ``None``: it has another loss, or none.
        on_cpu: whether it trains there in any case.
    """

    name: str
    words: tuple[str, ...] = ()
    verb: str = "fit"
    within: float | None = EXACT
    on_cpu: bool = False


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    Args:
        name: of the run.
        error: of a run that failed; ``None``: it did not.
        loss: the last one; ``None``: there is none.
        seconds: from start to end.
        state: bytes of tensors on the device between steps; ``None``: not on a GPU.
        said: what a failed run said, from its end.
    """

    name: str
    error: str | None
    loss: float | None
    seconds: float
    state: float | None = None
    said: str = ""


_FIT = (
    *("recipe=gpt", "size=nano", "max_steps=8", "micro_batch_size=4", "global_batch_size=8", "callbacks.sample=null"),
    *("trainer.limit_val_batches=2", "trainer.val_check_interval=8", "trainer.log_every_n_steps=1"),
    *("monitor.progress_bar=null", "monitor.start_summary=null"),
)
_FP16 = ("precision=16-mixed",)
_BF16 = ("precision=bf16-mixed",)
_FLOAT8 = ("module.float8=tensorwise",)


def fit(name: str, *words: str, within: float | None = EXACT) -> Run:
    """Return a run of `fit`."""
    return Run(name, words, within=within)


RUNS = (
    Run(REFERENCE, ("strategy=single",), on_cpu=True),
    fit("single", "strategy=single"),
    fit("ddp", "strategy=ddp"),
    fit("ddp, communication=auto", "strategy=ddp", "strategy.communication=auto"),
    fit("zero1", "strategy=zero1"),
    fit("zero1, offload", "strategy=zero1", "strategy.offload=optimizer"),
    fit("zero2", "strategy=zero2"),
    fit("zero2, offload", "strategy=zero2", "strategy.offload=optimizer"),
    fit("zero3", "strategy=zero3"),
    fit("zero3, offloaded optimizer", "strategy=zero3", "strategy.offload=optimizer"),
    fit("zero3, offloaded parameters", "strategy=zero3", "strategy.offload=parameters"),
    fit("zero3, meta, prefetch 0", "strategy=zero3", "module.meta=true", "strategy.prefetch=0", within=None),
    fit("zero3, recomputed", "strategy=zero3", "strategy.activation_checkpointing=full"),
    fit("zero3, compiled", "strategy=zero3", "strategy.compile=true"),
    fit("zero3, bf16", "strategy=zero3", *_BF16, within=ROUNDED),
    fit("zero2, bf16, compiled", "strategy=zero2", *_BF16, "strategy.compile=true", within=ROUNDED),
    fit("zero1, bf16", "strategy=zero1", *_BF16, within=ROUNDED),
    fit("ddp, bf16", "strategy=ddp", *_BF16, within=ROUNDED),
    fit("zero3, float8", "strategy=zero3", *_BF16, "module.float8=rowwise", within=ROUNDED),
    fit("zero3, float8 gathers", "strategy=zero3", *_BF16, *_FLOAT8, within=ROUNDED),
    fit("ddp, float8, compiled", "strategy=ddp", *_BF16, *_FLOAT8, "strategy.compile=true", within=ROUNDED),
    fit("single, bf16, compiled", "strategy=single", *_BF16, "strategy.compile=true", within=ROUNDED),
    fit("single, bf16-true", "strategy=single", "precision=bf16-true", within=None),
    fit("zero3, fp16", "strategy=zero3", *_FP16, within=ROUNDED),
    fit("ddp, fp16", "strategy=ddp", *_FP16, within=ROUNDED),
    fit("hybrid", "strategy=hybrid"),
    fit("parameter server", "strategy=parameter_server"),
    fit("parameter server, async", "strategy=parameter_server", "strategy.consistency=async", within=None),
    fit("auto", "strategy=auto", within=None),
    fit("zero2, all monitors", "strategy=zero2", "monitor=thorough", "monitor.profile=[3,4]"),
    fit("zero3, replica check", "strategy=zero3", "monitor=replica_check", "monitor.replica_check.every_n_steps=2"),
    fit(
        "zero3, asynchronous checkpoints",
        *("strategy=zero3", "checkpoint=async", "checkpoint.last.every=null", "checkpoint.last.every_n_steps=2"),
    ),
    fit("ddp, snapshots", "strategy=ddp", "guard=rollback", "guard.loss.snapshot_every_n_steps=2"),
    fit("moe", "recipe=moe", "strategy=single", within=None),
    Run("doctor", ("accelerator=gpu",), verb="doctor", within=None),
    Run("profile", ("accelerator=gpu",), verb="profile", within=None),
)


RUNS_OF_SEVERAL = (
    fit("ddp, reduce_scatter", "strategy=ddp", "strategy.average_by=reduce_scatter"),
    fit("ddp, PowerSGD", "strategy=ddp", "strategy.compression=powersgd", within=None),
    fit("tensor", "strategy=tensor"),
    fit("tensor, sequence parallel", "strategy=tensor", "strategy.sequence_parallel=true"),
    fit("pipeline", "strategy=pipeline"),
    fit("pipeline, bf16", "strategy=pipeline", *_BF16, within=ROUNDED),
    fit("context", "strategy=context"),
    fit("moe, experts", "recipe=moe", "strategy=expert", within=None),
    fit("context, ulysses", "strategy=context", "strategy.attention=ulysses"),
    fit("local_sgd", "strategy=local_sgd", "strategy.sync_every=2", within=None),
    fit("diloco", "strategy=diloco", "strategy.sync_every=2", "strategy.overlap_steps=1", within=None),
    fit("diloco, offload", "strategy=diloco", "strategy.sync_every=2", "strategy.offload_outer=true", within=None),
)
"""Runs that need several ranks."""


def main() -> None:
    """Run the commands, several at a time, and print the outcomes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.runs", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=1, help="of each run; with several, layouts that need them too")
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at a time")
    parser.add_argument("--only", nargs="+", help="names of runs, besides the reference (default: all)")
    parser.add_argument("--out", type=Path, help="file of the outcomes")
    options = parser.parse_args()
    several = options.ranks > 1
    runs = [*(run for run in RUNS if not several or run.verb == "fit"), *(RUNS_OF_SEVERAL if several else ())]
    chosen = [run for run in runs if run.name == REFERENCE or not options.only or run.name in options.only]
    with tempfile.TemporaryDirectory(prefix="trainwright-gpu-") as folder:
        outcomes = tried(chosen, options.device, options.ranks, options.at_once, Path(folder))
    for each in outcomes:
        loss = "" if each.loss is None else f"loss {each.loss:.6f}"
        state = "" if each.state is None else f"{each.state / 2**20:.1f} MiB"
        print(f"{each.name:32} {each.seconds:5.0f} s  {loss:16}{state:>10}  {each.error or ''}")
    if options.out:
        options.out.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))


def tried(runs: Sequence[Run], device: str, ranks: int, at_once: int, folder: Path) -> list[Outcome]:
    """Try runs; one that ended with another loss than the reference has an error."""
    with ThreadPoolExecutor(at_once) as executor:
        found = list(executor.map(lambda run: _tried(run, device, ranks, folder), runs))
    reference = next((each.loss for each in found if each.name == REFERENCE), None)
    return [_compared(run, each, reference) for run, each in zip(runs, found, strict=True)]


def _tried(run: Run, device: str, ranks: int, folder: Path) -> Outcome:
    place = folder / run.name.replace(" ", "_").replace(",", "")
    place.mkdir()
    words = list(run.words)
    if run.verb == "fit":
        where = "cpu" if run.on_cpu or device == "cpu" else "gpu"
        count = 1 if "strategy=single" in words else ranks
        words = [*_FIT, *words, f"devices={count}", f"accelerator={where}", f"run_dir={place / 'run'}"]
    elif device == "cpu":
        words = [word.replace("=gpu", "=cpu") for word in words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    started, printed = time.monotonic(), place / "printed.txt"
    with printed.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainwright", run.verb, *words],
            cwd=place,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds, text = time.monotonic() - started, printed.read_text(errors="replace")
    if code != 0:
        said = "\n".join([text, *(file.read_text(errors="replace") for file in place.glob("run/logs/*.log"))])
        return Outcome(run.name, "hung" if code is None else last_error(said), None, seconds, said=said[-_KEPT:])
    metrics = place / "run" / "metrics.csv"
    return Outcome(run.name, None, _last(metrics, "loss"), seconds, _last(metrics, "memory/allocated"))


def _last(file: Path, metric: str) -> float | None:
    if not file.exists():
        return None
    with file.open(newline="") as lines:
        values = [row[metric] for row in csv.DictReader(lines) if row.get(metric)]
    return float(values[-1]) if values else None


def _compared(run: Run, outcome: Outcome, reference: float | None) -> Outcome:
    if outcome.error is not None or run.within is None or reference is None:
        return outcome
    if outcome.loss is None:
        return replace(outcome, error="it has no loss")
    distance = abs(outcome.loss - reference) / abs(reference)
    wrong = None if distance <= run.within else f"loss differs from the reference by {distance:.1e}"
    return replace(outcome, error=wrong)


if __name__ == "__main__":
    main()
