"""Fixed seeds of the fuzzer are equal or refused, and a failure is found, shrunk and written down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.cells import Outcome, References, tried
from tests.fuzz.compare import Cell
from tests.fuzz.draw import cells_of, program_of
from tests.fuzz.layouts import LAYOUTS
from tests.fuzz.program import MEANS, Program
from tests.fuzz.run import train
from tests.fuzz.script import script
from tests.fuzz.shrink import shrunk

# `make fuzz SEEDS=...` runs others.
SEEDS = (0, 1, 3)
CELLS = [(seed, cell) for seed in SEEDS for cell in cells_of(seed, program_of(seed))]


@pytest.mark.parametrize(("seed", "cell"), CELLS)
def test_seed(ranks: Any, seed: int, cell: str) -> None:
    outcome = tried(ranks, References(ranks), program_of(seed), cell)
    assert outcome.kind in ("equal", "refused"), outcome


def test_seeds_draw_the_same_programs_everywhere() -> None:
    """What one seed draws does not depend on the process."""
    code = "from tests.fuzz.draw import *; print([(program_of(s), cells_of(s, program_of(s))) for s in range(20)])"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == str([(program_of(seed), cells_of(seed, program_of(seed))) for seed in range(20)])


def test_every_component_and_layout_is_drawn() -> None:
    programs = [program_of(seed) for seed in range(600)]
    drawn = {cell for seed, program in enumerate(programs) for cell in cells_of(seed, program)}
    assert {name for cell in drawn for name in cell.split(">")} == LAYOUTS.keys()
    for slot in vars(Program()):
        assert len({getattr(program, slot) for program in programs}) > 1, slot
    assert 2 <= sum(len(cells_of(seed, program)) for seed, program in enumerate(programs)) / len(programs) <= 3


NOT_MEANS = (
    *("ignoring", "smoothed", "class_weighted", "masked_mean", "indexed_mean", "two_terms", "later_masked_term"),
    *("rmse", "sum_loss"),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("loss", NOT_MEANS)
def test_wrong_weights_of_micro_batches_are_seen(ranks: Any, loss: str, double: bool) -> None:
    """The mean of two halves' losses is not the loss of a batch, and the comparison says so."""
    program = Program(network="transformer", loss=loss, padded_from=16, steps=5, double=double)
    whole, halves = (ranks(train, 1, program, None, parts, init_group=False) for parts in (1, 2))
    found = list(Cell(program, ("pipeline",)).differences(halves, whole))
    assert "loss of step 2" in found[0] if loss not in ("sum_loss", "rmse", "class_weighted") else found
    assert any("parameter" in text or "net." in text for text in found)


@pytest.mark.parametrize("loss", [name for name in MEANS if name != "per_sample_mean"])
def test_means_are_those_of_any_equal_parts(ranks: Any, loss: str) -> None:
    program = Program(network="transformer", loss=loss, padded_from=16, steps=5)
    whole, halves = (ranks(train, 1, program, None, parts, init_group=False) for parts in (1, 2))
    found = list(Cell(program, ("pipeline",)).differences(halves, whole))
    assert [text for text in found if "loss_step" not in text and "0 samples" not in text] == []


def test_failures_are_shrunk_to_what_they_need() -> None:
    def run(program: Program, cell: str) -> Outcome:
        fails = program.loss == "masked_mean" and program.padded_from > 0 and "gpipe" in cell
        return Outcome("wrong" if fails else "equal")

    seed = next(seed for seed in range(1000) if _is_masked(program_of(seed)))
    program, cell, outcome = shrunk(run, program_of(seed), "zero3>gpipe", Outcome("wrong"))
    assert (program, cell) == (Program(loss="masked_mean", padded_from=1, seed=seed), "gpipe")
    assert outcome.is_failure


def _is_masked(program: Program) -> bool:
    return program.loss == "masked_mean" and program.padded_from > 0 and program.stop > 0 and bool(program.callbacks)


def run_script(text: str, *arguments: str) -> float:
    """Run a script on the ranks of the default process group; return the sum of weights that it prints."""
    sys.argv = ["script.py", *arguments]
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "script.py", "exec"), scope)
    return float(scope["total"])


def test_scripts_reproduce_programs(ranks: Any) -> None:
    program = Program(network="tied", loss="ignoring", optimizer="grouped", scheduler="warmup", padded_from=16)
    text = script(program, "zero2")
    assert "tests" not in text
    (expected,) = ranks(run_script, 1, text, init_group=False)
    assert ranks(run_script, 2, text, "zero2") == pytest.approx([expected] * 2, rel=1e-9)
    (own,) = ranks(train, 1, program, None, 2, init_group=False)
    assert sum(abs(value).sum() for name, value in own.tensors.items() if "buffer" not in name) == pytest.approx(
        expected
    )
