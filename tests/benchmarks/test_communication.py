from __future__ import annotations

import pytest

from benchmarks.communication import AXES, measure_all
from trainwright.recipes.gpt_model import GPTConfig

# Large enough that headers of messages are less than 2 % of what the kernel sees.
SMALL = GPTConfig(layers=2, dim=64, heads=4, seq_len=64, tied_head=False)
# Not every method reaches its least: what else is sent does not grow with the number of blocks.
MOST = {"tensor, sequence": 1.15, "context, ring": 1.3, "context, ulysses": 1.3, "context, gather": 1.3, "expert": 1.15}


def test_axes_send_little_more_than_the_least(ranks):
    names = [name for name in AXES if " x " not in name]
    for row in ranks(measure_all, 2, names, SMALL, 4, timeout=60)[0]:
        assert 0.99 < row["ratio"] <= MOST.get(row["axis"], 1.01), row
        assert row["sent"] == pytest.approx(sum(row["by_kind"].values()), abs=4)
        assert row["backend"] == pytest.approx(row["kernel"], rel=0.02), row
        assert row["sent"] == pytest.approx(sum(row["by_axis"].values()), abs=4)
        assert set(row["by_axis"]) <= {*axes_of(row["axis"])}, row


def axes_of(name):
    """Mesh axes that a line of the table may send along: its own, and that which averages gradients."""
    own = name.partition(",")[0]
    return {"ddp": ["replicate"], "expert": ["expert", "shard"]}.get(own, ["shard" if own.startswith("zero") else own])
