"""Fixed seeds of the fuzzer are equal or refused, and a failure is found, shrunk and written down."""

from __future__ import annotations

import importlib.util
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
SEEDS = (0, 1, 2, 3, 6, 9, 13, 122)
CELLS = [(seed, cell) for seed in SEEDS for cell in cells_of(seed, program_of(seed))]


@pytest.mark.parametrize(("seed", "cell"), CELLS)
def test_seed(ranks: Any, seed: int, cell: str) -> None:
    outcome = tried(ranks, References(ranks), program_of(seed), cell)
    assert outcome.kind in ("equal", "refused"), outcome


# Programs that were wrong, as small as they could be made.
FOUND = [
    ("ddp>ddp", Program(rest=3, epochs=2, stop=2)),
    ("ddp", Program(module="Metrics", rest=1)),
    ("ddp", Program(loader="combined", rest=3)),
    ("ddp", Program(scheduler="plateau_by_step", rest=3)),
    ("gpipe", Program(network="transformer", callbacks=("swa",), epochs=3, steps=2, after="validate")),
    ("gpipe", Program(module="Tracking", epochs=2, steps=2, rest=1)),
    ("gpipe>gpipe", Program(module="Tracking", epochs=2, steps=2, rest=1, stop=2)),
    ("servers", Program(module="Typed")),
    ("single", Program(loader="own_batch_sampler", after="predict")),
]


@pytest.mark.parametrize(("cell", "program"), FOUND)
def test_found(ranks: Any, cell: str, program: Program) -> None:
    assert tried(ranks, References(ranks), program, cell).kind == "equal"


def drawn() -> str:
    """Return what seeds draw."""
    return str([(program_of(seed), cells_of(seed, program_of(seed))) for seed in range(50)])


def test_seeds_draw_the_same_in_every_process(ranks: Any) -> None:
    assert ranks(drawn, 1, init_group=False) == [drawn()]


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


@pytest.mark.sample(2)
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("loss", [*NOT_MEANS, *(name for name in MEANS if name != "per_sample_mean")])
def test_wrong_weights_of_micro_batches_are_seen(ranks: Any, loss: str, double: bool) -> None:
    """The mean of the losses of two halves is that of a batch for means over samples only, which is seen."""
    program = Program(network="transformer", loss=loss, padded_from=16, steps=5, double=double)
    whole, halves = (ranks(train, 1, program, None, parts, init_group=False) for parts in (1, 2))
    found = [text for text in Cell(program, ("pipeline",)).differences(halves, whole) if "loss_" not in text]
    assert bool(found) == (loss in NOT_MEANS), found
    assert any("loss of step" in text for text in found) == any("net." in text for text in found) == bool(found)


def test_failures_are_shrunk_to_what_they_need() -> None:
    def run(program: Program, cell: str) -> Outcome:
        fails = program.loss == "masked_mean" and program.padded_from > 0 and "gpipe" in cell
        return Outcome("wrong" if fails else "equal")

    seed = next(seed for seed in range(1000) if _is_masked(program_of(seed)))
    program, cell, outcome = shrunk(run, program_of(seed), "zero3>gpipe", Outcome("wrong"))
    assert (program, cell) == (
        Program(loss="masked_mean", padded_from=program_of(seed).padded_from, seed=seed),
        "gpipe",
    )
    assert outcome.is_failure


def _is_masked(program: Program) -> bool:
    return program.loss == "masked_mean" and program.padded_from > 0 and program.stop > 0 and bool(program.callbacks)


def run_script(path: str, *arguments: str) -> float:
    """Run a script on the ranks of the default process group; return the sum of weights that it prints."""
    sys.argv = [path, *arguments]
    spec = importlib.util.spec_from_file_location("fuzz_script", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_script"] = module  # where the source of its classes is looked up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["fuzz_script"]
    return float(module.total)


def test_scripts_reproduce_programs(ranks: Any, tmp_path: Path) -> None:
    program = Program(network="tied", loss="ignoring", optimizer="grouped", scheduler="warmup", padded_from=16)
    text = script(program, "zero2")
    assert "tests" not in text
    path = tmp_path / "script.py"
    path.write_text(text)
    (expected,) = ranks(run_script, 1, str(path), init_group=False)
    assert ranks(run_script, 2, str(path), "zero2") == pytest.approx([expected] * 2, rel=1e-9)
    (own,) = ranks(train, 1, program, None, 2, init_group=False)
    assert sum(abs(value).sum() for name, value in own.tensors.items() if "buffer" not in name) == pytest.approx(
        expected
    )
