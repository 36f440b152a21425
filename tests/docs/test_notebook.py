"""The notebooks of the documentation run from top to bottom, in a kernel of Jupyter."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
SECONDS = 120  # of one cell; a longer one fails with CellTimeoutError, which shows its source
EVERY_RANK = '"devices": 1'


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", [file.name for file in TUTORIALS.glob("*.ipynb")])
def test_cells_run_in_order(tmp_path, name, devices):
    notebook = nbformat.read(TUTORIALS / name, as_version=4)
    first = next(cell for cell in notebook.cells if EVERY_RANK in cell.source)
    # ZeRO forks one rank too; the first Trainer of the page stays on one device.
    if devices > 1:
        first.source = first.source.replace(EVERY_RANK, f'"devices": {devices}').replace('"single"', '"ddp"')
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [each.text for each in notebook.cells[-1].outputs if each.get("name") == "stdout"]
    assert "after 40" in "".join(shown)
    assert (tmp_path / "states/step=40").is_dir()
