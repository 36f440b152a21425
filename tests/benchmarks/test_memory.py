import pytest
import torch

from benchmarks.live_bytes import LiveBytes
from benchmarks.memory import STAGES, formula, measure_all
from trainwright.recipes.gpt.model import GPTConfig

SMALL = GPTConfig(layers=2, dim=64, heads=8, hidden=192, seq_len=4)


def test_formulas_are_those_of_the_paper():
    assert [formula(stage, 100, 1) for stage in range(4)] == [1600.0] * 4
    assert [formula(stage, 100, 4) for stage in range(4)] == [1600.0, 1000.0, 700.0, 400.0]


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [1, 2])
def test_held_bytes_stay_below_the_formula(ranks, world_size):
    rows = ranks(measure_all, world_size, list(STAGES), [1, 2], SMALL)[0]
    assert [(row["strategy"], row["accumulation"]) for row in rows] == [(s, a) for s in STAGES for a in (1, 2)]
    for row in rows:
        assert row["N"] == world_size
        assert row["ratio"] <= 1.02, row
        assert row["peak"] == row["parameters"] + row["gradients"] + row["optimizer"]
        assert row["all_tensors"] >= row["peak"]


def test_live_bytes_forgets_what_is_freed_or_resized():
    with LiveBytes() as live:
        kept = torch.ones(100)
        dropped = torch.ones(50)
        assert live.now() == 600
        del dropped
        assert live.now() == 400
        kept.untyped_storage().resize_(0)
        assert live.now() == 0
    assert live.peak == 600
