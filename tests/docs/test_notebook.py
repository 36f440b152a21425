"""The notebooks of the documentation run from top to bottom."""

import json
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


def run(source: str) -> None:
    exec(compile(source, "notebook", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", [file.name for file in TUTORIALS.glob("*.ipynb")])
def test_cells_run_in_order(ranks, name):
    cells = json.loads((TUTORIALS / name).read_text())["cells"]
    ranks(run, 1, "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
