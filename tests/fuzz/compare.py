"""Comparison of a run with one process: what of it must be equal, and what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.fuzz.layouts import LAYOUTS, Layout
from tests.fuzz.program import BY_BATCH_ALONE, ONCE_PER_BATCH, RANDOM, SEQUENCES, Program
from tests.fuzz.run import Run
from tests.zoo.cells import tensor_differences


@dataclass(frozen=True)
class Tolerance:
    """Relative distances."""

    loss: float
    tensors: float

    @staticmethod
    def of(program: Program) -> Tolerance:
        """Return those for the precision of a program."""
        if program.precision != "32-true":
            return Tolerance(5e-2, 0.2)
        if program.double:
            # Certain parts compute in float32 in any case.
            return Tolerance(2e-6, 2e-6)
        return Tolerance(1e-5, 3e-5)


def comparable(program: Program, layout: Layout) -> bool:
    """Return whether a layout has the numbers of one process by design."""
    parts, used = layout.parts(program), program.components
    if layout.strategy == "single" and program.loader == "shuffled":
        return False  # compared with itself
    if "context" in layout.options and program.network not in SEQUENCES:
        return False
    if parts > 1 and used & {*RANDOM, *BY_BATCH_ALONE}:
        return False
    if used & {*ONCE_PER_BATCH} and not (parts == 1 or (parts == layout.data_ranks and program.is_mean)):
        return False
    # Lightning divides the losses of a step with fewer micro-batches by their usual number.
    return parts == 1 or program.rest == 0 or (program.is_mean and parts == layout.data_ranks)


@dataclass(frozen=True)
class Cell:
    """A program under one layout, or interrupted under one and resumed under another.

    Attributes:
        program, names: the program; the layouts' names.
    """

    program: Program
    names: tuple[str, ...]

    @property
    def layouts(self) -> list[Layout]:
        """The layouts, in the order in which they run."""
        return [LAYOUTS[name] for name in self.names]

    @property
    def parts(self) -> int:
        """Micro-batches of a step, on all data ranks."""
        return max(layout.parts(self.program) for layout in self.layouts)

    def parts_under(self, name: str) -> int:
        """Micro-batches of a step under one of the layouts."""
        return LAYOUTS[name].parts(self.program) if self.program.is_mean else self.parts

    @property
    def is_whole(self) -> bool:
        """Whether one process may run each step as a single batch, rather than accumulate the same micro-batches."""
        return self.program.is_mean or self.parts == 1

    @property
    def waves(self) -> int:
        """Micro-batches that the layouts read at once."""
        return max(layout.data_ranks for layout in self.layouts)

    @property
    def logs_alike(self) -> bool:
        """Whether values that a step logs are of the same samples on one process."""
        return all(
            self.parts_under(name) == layout.data_ranks or (not self.is_whole and layout.data_ranks == self.waves)
            for name, layout in zip(self.names, self.layouts, strict=True)
        )

    @property
    def reference(self) -> tuple[str | None, int, int]:
        """Layout (none: Lightning on one process), micro-batches of a step and waves of the run to compare with."""
        if self.program.drops:
            return self.names[0], self.parts, 1
        # Where Lightning has not the order of samples, or on CPUs the precision, one process of ours is the reference.
        ours = self.program.loader == "shuffled" or (self.program.precision == "16-mixed" and self.names != ("single",))
        single = "single" if ours else None
        return (single, 1, 1) if self.is_whole else (single, self.parts, self.waves)

    def _gives_losses(self, step: int) -> bool:
        """Return whether losses of ranks are weighted by their samples: not those that a module returns itself."""
        by_hand = self.program.module == "ByHand" and self.waves > 1
        return not by_hand or self.program.rest == 0 or (step + 1) % self.program.per_epoch > 0

    def differences(self, runs: list[Run], references: list[Run], ended: bool = True) -> Iterator[str]:
        """Yield what differs from one process, the first difference first.

        Args:
            runs: of each rank.
            references: one run of one process, or of each rank.
            ended: whether the runs ended without an error; else only their steps are compared.
        """
        reference = references[0]
        loss_tolerance = Tolerance.of(self.program).loss
        count = min(len(run.losses) for run in runs)
        for step in range(count):
            if step >= len(reference.losses):
                yield f"step {step}: one process ended before"
                return
            yield from _other_samples(runs, references, step)
            ours, theirs = _mean_loss(runs, step), _mean_loss(references, step)
            if self._gives_losses(step) and _differs(ours, theirs, loss_tolerance):
                yield f"loss of step {step}: {ours:.8g} instead of {theirs:.8g}"
            for rank, run in enumerate(runs):
                for key, theirs in references[rank % len(references)].steps[step].items():
                    ours = run.steps[step].get(key, math.nan)
                    if (key != "loss_step" or self.logs_alike) and _differs(ours, theirs, loss_tolerance):
                        yield f"step {step}, rank {rank}: {key} {ours:.8g} instead of {theirs:.8g}"
        if not ended:
            return
        if count != len(reference.losses):
            yield f"{count} steps instead of {len(reference.losses)}"
        yield from self._later_differences(runs, references)

    def _later_differences(self, runs: list[Run], references: list[Run]) -> Iterator[str]:
        # Replicas have statistics of their own samples; where these are used, ranks must agree.
        by_replica = self.program.network == "batch_norm" and self.waves > 1
        tolerance = Tolerance.of(self.program)
        for rank, run in enumerate(runs):
            reference = references[rank % len(references)]
            for what in ("epochs", "validations"):
                expected = getattr(runs[0] if by_replica else reference, what)
                if len(self.names) > 1:  # the state of a metric is not in checkpoints
                    expected = [{key: each[key] for key in each if key != "train_mean"} for each in expected]
                yield from _other_values(f"rank {rank}: {what}", expected, getattr(run, what), 3 * tolerance.loss)
            if not by_replica:
                yield from tensor_differences(
                    f"rank {rank}, after fit: ", reference.after, run.after, 3 * tolerance.tensors
                )
            buffers = {name: value for name, value in run.tensors.items() if name.startswith("buffer ")}
            others = {name: value for name, value in reference.tensors.items() if "metric" not in name}
            if by_replica:
                others = {name: value for name, value in others.items() if name not in buffers}
                others |= {name: runs[0].tensors[name] for name in buffers}
            yield from tensor_differences(f"rank {rank}: ", others, run.tensors, tolerance.tensors)


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


def _other_values(
    what: str, expected: list[dict[str, float]], found: list[dict[str, float]], tolerance: float
) -> Iterator[str]:
    if len(expected) != len(found):
        yield f"{what}: {len(found)} instead of {len(expected)}"
    for place, (theirs, ours) in enumerate(zip(expected, found, strict=False)):
        for key, value in theirs.items():
            if _differs(ours.get(key, math.nan), value, tolerance):
                yield f"{what} {place}: {key} {ours.get(key, math.nan):.8g} instead of {value:.8g}"


def _mean_loss(runs: list[Run], step: int) -> float:
    return sum(run.losses[step] for run in runs) / len(runs)


def _other_samples(runs: list[Run], references: list[Run], step: int) -> Iterator[str]:
    expected = sorted(each for run in references for each in run.ids[step])
    read = sorted({each for run in runs for each in run.ids[step]})
    if read != sorted(set(expected)):
        yield f"samples of step {step}: {read} instead of {expected}"
    for rank, run in enumerate(runs):
        for other in runs[:rank]:
            if other.data_rank == run.data_rank and other.ids[step] != run.ids[step]:
                yield f"samples of step {step} differ between ranks of one replica"


def _differs(ours: float, theirs: float, tolerance: float) -> bool:
    if math.isnan(theirs):
        return not math.isnan(ours)
    return not abs(ours - theirs) <= tolerance * max(abs(theirs), 1e-2)
