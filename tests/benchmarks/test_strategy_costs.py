"""What strategies hold and send, beside their formulas, on two ranks."""

from __future__ import annotations

from typing import Any

from benchmarks.strategy_costs import COSTS, for_people, measure_all, possible_on
from trainwright.recipes.gpt.model import GPTConfig

SMALL = GPTConfig(layers=2, dim=64, heads=4, seq_len=32, tied_head=False)
# What else is sent does not grow with the number of blocks; rows of an embedding that no token touched are not pushed.
SENT = {"context, ring": (0.99, 1.3), "expert": (0.9, 1.15), "parameter_server": (0.8, 1.2)}


def test_what_is_held_and_sent_is_what_the_formulas_say(ranks: Any) -> None:
    names = possible_on(2)
    assert set(COSTS) - set(names) == {"hybrid: zero3 x tensor 2", "hybrid: zero3 x pipeline"}
    rows = ranks(measure_all, 2, names, SMALL, 4, timeout=120)[0]
    assert [row["strategy"] for row in rows] == names
    for row in rows:
        assert 0.99 < row["held ratio"] < 1.02, row
        least, most = SENT.get(row["strategy"], (0.99, 1.01))
        assert least < row["sent ratio"] < most, row
        assert for_people(row)["held"] == round(row["held"] / 1024, 1)
