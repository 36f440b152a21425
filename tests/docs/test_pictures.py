"""The picture of a layout shows where `Layout` places ranks."""

from __future__ import annotations

import re
import runpy
from xml.etree import ElementTree

from tests.docs.blocks import ROOT

PICTURES = ROOT / "docs" / "pictures"


def test_the_picture_of_a_layout_is_the_one_that_is_drawn() -> None:
    drawn = runpy.run_path(str(PICTURES / "draw.py"))
    layout = drawn["LAYOUT"]
    shown = (PICTURES / "layout.svg").read_text(encoding="utf-8")
    assert shown == drawn["layout_picture"](layout), "run `python docs/pictures/draw.py layout`"
    assert sorted(map(int, re.findall(r">rank (\d+)<", shown))) == list(range(layout.world_size))
    assert "samples 1: ranks 0, 1, 4, 5" in shown  # stages and tensor ranks read the same samples


def test_no_text_of_the_picture_crosses_the_edge_of_a_box() -> None:
    pixels = 12 * 0.55  # of a character of a wide sans-serif font
    shapes = list(ElementTree.parse(PICTURES / "layout.svg").getroot())
    number = {shape: {name: float(value) for name, value in shape.items() if value[0].isdigit()} for shape in shapes}
    frame, *boxes = [number[shape] for shape in shapes if shape.tag.endswith("rect")]
    texts = [shape for shape in shapes if shape.tag.endswith("text")]
    assert len(boxes) == 10
    for text in texts:
        x, y, width = number[text]["x"], number[text]["y"], pixels * len(text.text or "")
        left = x - (width / 2 if text.get("text-anchor") == "middle" else 0)
        assert 0 <= left <= left + width <= frame["width"], text.text
        for box in boxes:
            first, last = box["x"], box["x"] + box["width"]
            is_beside = not box["y"] < y < box["y"] + box["height"] or left + width < first or last < left
            assert is_beside or first < left < left + width < last, text.text
