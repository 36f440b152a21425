"""The record of a GPU: its page, and what counts as a failed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import RESULTS
from benchmarks.gpu.page import PAGE, newest, page
from benchmarks.gpu.runs import REFERENCE, RUNS, RUNS_OF_SEVERAL, Run, fit, tried


def test_page_is_that_of_the_last_record():
    """``python -m benchmarks.gpu --page`` would change nothing."""
    assert PAGE.read_text() == page(newest(RESULTS))


def test_runs_have_names_of_their_own():
    names = [run.name for run in (*RUNS, *RUNS_OF_SEVERAL)]
    assert len(set(names)) == len(names)


@pytest.mark.thorough
def test_runs_are_compared_with_the_reference(tmp_path: Path):
    few = ("max_steps=2", "trainer.limit_val_batches=0")
    runs = (
        Run(REFERENCE, ("strategy=single", *few), on_cpu=True),
        fit("equal", "strategy=zero2", *few),
        fit("other", "strategy=zero2", *few, "optimizer.lr=1"),
        fit("refused", "strategy=single", *few, "strategy.no_such=1"),
    )
    reference, equal, other, refused = tried(runs, "cpu", 1, 2, tmp_path)
    assert reference.error is None
    assert equal.error is None
    assert equal.loss == pytest.approx(reference.loss, rel=1e-4)
    assert other.error is not None
    assert "differs" in other.error
    assert refused.error is not None
    assert "no_such" in refused.error
