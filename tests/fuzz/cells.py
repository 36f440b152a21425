"""Cells of the fuzzer: a program under a layout, compared with one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz.layouts import LAYOUTS, Layout
from tests.fuzz.program import RANDOM, SEQUENCES, Program
from tests.fuzz.run import Run, train
from tests.pool import RankError, RankPool, RankTimeout
from tests.zoo.cells import tensor_differences

TIMEOUT = 40.0


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        kind: ``equal``, ``refused``, ``wrong``, ``hung``, ``crashed``, or ``undefined``: not finite on one process.
        text: what differs or was said, in one line.
    """

    kind: str
    text: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the product is at fault."""
        return self.kind in ("wrong", "hung", "crashed")

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


@dataclass(frozen=True)
class Tolerance:
    """Relative distances."""

    loss: float
    tensors: float

    @staticmethod
    def of(program: Program) -> Tolerance:
        """Return those for the precision of a program."""
        if program.precision != "32-true":
            return Tolerance(5e-2, 5e-2)
        if program.double:
            # Certain parts compute in float32 in any case.
            return Tolerance(2e-6, 2e-6)
        return Tolerance(1e-5, 3e-5)


def comparable(program: Program, layout: Layout) -> bool:
    """Return whether a layout has the numbers of one process by design."""
    parts = layout.parts(program)
    if layout.strategy == "single" and program.loader == "shuffled":
        return False  # compared with itself
    if "context" in layout.options and program.network not in SEQUENCES:
        return False
    if program.loss in RANDOM and parts > 1:
        return False
    if program.scheduler == "plateau_by_step" and (parts > layout.data_ranks or (parts > 1 and not program.is_mean)):
        return False
    if program.module == "ByHand" and (program.accumulation > 1 or (parts > 1 and not program.is_mean)):
        return False
    return parts == 1 or program.rest == 0 or program.is_mean


class References:
    """Runs on one process, each made once."""

    def __init__(self, ranks: Callable[..., list[Any]]) -> None:
        self._ranks = ranks
        self.of = cache(self._of)

    def _of(self, program: Program, parts: int, waves: int) -> Run:
        """Return the run of a program whose steps have so many micro-batches."""
        layout = "single" if program.loader == "shuffled" else None
        (run,) = self._ranks(train, 1, replace(program, stop=0), layout, parts, waves, init_group=False)
        if run.error:
            raise AssertionError(f"one process: {run.trace}")
        found: Run = run
        return found


def tried(ranks: Callable[..., list[Any]], references: References, program: Program, cell: str) -> Outcome:
    """Run a cell and return its outcome.

    Args:
        ranks: runs a function on ranks; see :mod:`tests.pool`.
        references: runs on one process.
        program: what to run.
        cell: the layout, or ``FIRST>SECOND``: the run is stopped under the first and resumed under the second.
    """
    names = cell.split(">")
    compared = replace(program, stop=0) if len(names) == 1 else program
    layouts = [LAYOUTS[name] for name in names]
    parts = max(layout.parts(program) for layout in layouts)
    whole = program.is_mean or parts == 1
    waves = max(layout.data_ranks for layout in layouts)
    reference = references.of(replace(program, stop=0), *((1, 1) if whole else (parts, waves)))
    if not all(math.isfinite(loss) for loss in reference.losses):
        return Outcome("undefined", "losses of one process are not finite")
    runs: list[Run] = []
    with TemporaryDirectory() as folder:
        for name in names:
            saves = f"{folder}/saved" if name is names[0] and len(names) > 1 else ""
            resumes = f"{folder}/saved" if runs else None
            try:
                answers = ranks(train, LAYOUTS[name].ranks, compared, name, parts, 1, saves, resumes, timeout=TIMEOUT)
            except RankTimeout as error:
                return Outcome("hung", _line(str(error), 300))
            except RankError as error:
                return Outcome("crashed", _line(f"died: {error}", 300))
            latest = [run for run in answers if run is not None]
            runs = joined(runs, latest)
            if outcome := _failed(latest, runs, reference, program, layouts[-1], parts):
                return outcome
    return _judged(list(differences(runs, reference, program, layouts[-1], parts)))


def joined(first: list[Run], second: list[Run]) -> list[Run]:
    """Return runs that were resumed as if they had not been interrupted."""
    if not first:
        return second
    before = first[0]
    merged = []
    for run in second:
        # Samples of all ranks before, on the first; epochs and evaluations that ended before.
        ids = [sorted({each for other in first for each in other.ids[step]}) for step in range(len(before.ids))]
        losses = [sum(other.losses[step] for other in first) / len(first) for step in range(len(before.losses))]
        merged.append(
            replace(
                run,
                losses=losses + run.losses,
                ids=ids + run.ids,
                steps=before.steps + run.steps,
                epochs=before.epochs + run.epochs,
                validations=before.validations + run.validations,
            )
        )
    return merged


def _failed(
    latest: list[Run], runs: list[Run], reference: Run, program: Program, layout: Layout, parts: int
) -> Outcome | None:
    failed = [run for run in latest if run.error]
    if not failed:
        return None
    first = min(failed, key=lambda run: run.when)
    said = _line(first.error, 400)
    wrong = list(differences(runs, reference, program, layout, parts, ended=False))
    if wrong:
        return Outcome("wrong", f"before {said}: {wrong[0]}")
    if not first.ours:
        return Outcome("crashed", f"{said} [{_place(first.trace)}]")
    return Outcome("refused", said)


def _line(text: str, size: int) -> str:
    return " ".join(text.split())[:size]


def _place(trace: str) -> str:
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    ours = [line for line in lines if "trainwright" in line or "/wt/" in line]
    return (ours or lines or [""])[-1].replace('File "', "").rpartition("/src/")[2]


def _judged(found: list[str]) -> Outcome:
    return Outcome("wrong", f"{found[0]} (and {len(found) - 1} more)") if found else Outcome("equal")


def differences(
    runs: list[Run], reference: Run, program: Program, layout: Layout, parts: int, ended: bool = True
) -> Iterator[str]:
    """Yield what differs from one process, the first difference first."""
    tolerance = Tolerance.of(program)
    count = min(len(run.losses) for run in runs)
    for step in range(count):
        if step >= len(reference.losses):
            yield f"step {step}: one process ended before"
            return
        yield from _other_samples(runs, reference, step)
        loss = sum(run.losses[step] for run in runs) / len(runs)
        if _differs(loss, reference.losses[step], tolerance.loss):
            yield f"loss of step {step}: {loss:.8g} instead of {reference.losses[step]:.8g}"
        for rank, run in enumerate(runs):
            for key, theirs in reference.steps[step].items():
                if key == "loss_step" and not _logs_whole(program, layout, parts):
                    continue
                ours = run.steps[step].get(key, math.nan)
                if _differs(ours, theirs, tolerance.loss):
                    yield f"step {step}, rank {rank}: {key} {ours:.8g} instead of {theirs:.8g}"
    if not ended:
        return
    if count != len(reference.losses):
        yield f"{count} steps instead of {len(reference.losses)}"
    yield from _later_differences(runs, reference, program, layout, tolerance)


def _logs_whole(program: Program, layout: Layout, parts: int) -> bool:
    """Return whether the values logged at a step are those of the samples that one process logs then."""
    return parts == layout.data_ranks or not (program.is_mean or parts == 1)


def _other_samples(runs: list[Run], reference: Run, step: int) -> Iterator[str]:
    expected = sorted(reference.ids[step])
    read = sorted({each for run in runs for each in run.ids[step]})
    if read != sorted(set(expected)):
        yield f"samples of step {step}: {read} instead of {expected}"
    for rank, run in enumerate(runs):
        for other in runs[:rank]:
            if other.data_rank == run.data_rank and other.ids[step] != run.ids[step]:
                yield f"samples of step {step} differ between ranks of one replica"


def _later_differences(
    runs: list[Run], reference: Run, program: Program, layout: Layout, tolerance: Tolerance
) -> Iterator[str]:
    by_replica = program.network == "batch_norm" and layout.data_ranks > 1
    for rank, run in enumerate(runs):
        expected = runs[0] if by_replica else reference
        for what in ("epochs", "validations"):
            theirs_all, ours_all = getattr(expected, what), getattr(run, what)
            if len(theirs_all) != len(ours_all):
                yield f"rank {rank}: {len(ours_all)} {what} instead of {len(theirs_all)}"
            for place, (theirs, ours) in enumerate(zip(theirs_all, ours_all, strict=False)):
                for key, value in theirs.items():
                    if _differs(ours.get(key, math.nan), value, 3 * tolerance.loss):
                        yield f"{what} {place}, rank {rank}: {key} {ours.get(key, math.nan):.8g} instead of {value:.8g}"
        tensors = {
            name: value
            for name, value in reference.tensors.items()
            if not (by_replica and name.startswith("buffer")) and "metric" not in name
        }
        yield from (
            f"rank {rank}: {text}" for text in tensor_differences("parameter ", tensors, run.tensors, tolerance.tensors)
        )
        if by_replica:
            shared = {name: value for name, value in runs[0].tensors.items() if name.startswith("buffer")}
            yield from tensor_differences(f"rank {rank}, as on rank 0: ", shared, run.tensors, tolerance.tensors)


def _differs(ours: float, theirs: float, tolerance: float) -> bool:
    if math.isnan(theirs):
        return not math.isnan(ours)
    return not abs(ours - theirs) <= tolerance * max(abs(theirs), 1e-2)


def run_cell(pool: RankPool, program: Program, cell: str) -> Outcome:
    """Return the outcome of a cell; that of a program that one process cannot run is ``undefined``."""
    try:
        return tried(pool.run, References(pool.run), program, cell)
    except AssertionError as error:
        return Outcome("undefined", _line(str(error)[-300:], 300))
