"""The picture of a layout shows where `Layout` places ranks."""

from __future__ import annotations

import re
import runpy

from tests.docs.blocks import ROOT

PICTURES = ROOT / "docs" / "pictures"


def test_the_picture_of_a_layout_is_the_one_that_is_drawn() -> None:
    drawn = runpy.run_path(str(PICTURES / "draw.py"))
    layout = drawn["LAYOUT"]
    shown = (PICTURES / "layout.svg").read_text(encoding="utf-8")
    assert shown == drawn["layout_picture"](layout), "run `python docs/pictures/draw.py layout`"
    assert sorted(map(int, re.findall(r">rank (\d+)<", shown))) == list(range(layout.world_size))
    assert "samples 1: ranks 0, 1, 4, 5" in shown  # stages and tensor ranks read the same samples
