"""The page of libraries is made from the recorded outcomes, and environments have their versions."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.libraries.__main__ import PAGE, page
from tests.libraries.base import LOADED, SHUFFLED, order, rows_of
from tests.libraries.environments import LIBRARIES, SHARED
from tests.libraries.table import recorded
from tests.zoo.table import count


def test_page_is_up_to_date() -> None:
    """``python -m tests.libraries`` would change nothing."""
    assert PAGE.read_text() == page()


# Modules of which cells are still wrong, and why, as far as that is known.
WRONG = {
    ("torchgeo", "RegressionTask, resnet10t"): "a bias of norm 1e-2 differs by 1e-6",
    ("anomalib", "ReverseDistillation"): "not known; a loss differs by 5e-5 in the third step",
    ("monai", "ViTAutoEnc"): "its tensors refuse to meet those that follow a pipeline's values",
    ("pyannote", "PyanNet"): "builds a layer in each setup(), also between runs, where its weights are split",
    ("pyannote", "PyanNet, layer by layer"): "as above",
    ("schnetpack", "AtomisticTask, SchNet"): "a hyperparameter is the trained module, which ranks hold parts of",
    ("cellarium", "CellariumModule, LogisticRegression"): "a hyperparameter is a module on the meta device",
}


def test_only_known_outcomes_are_wrong() -> None:
    found = {
        (library, name.removesuffix(LOADED).removesuffix(SHUFFLED))
        for library, rows in recorded().items()
        for name, row in rows.items()
        if any(outcome.startswith("wrong") for outcome in row.values())
    }
    assert found == WRONG.keys()
    assert count(recorded())["modules"] > 0


def test_every_library_with_rows_is_recorded() -> None:
    """A file of rows without outcomes was never run."""
    files = {path.stem for path in Path(__file__).parent.glob("*.py")} & LIBRARIES.keys()
    assert recorded().keys() == files


def test_single_is_equal_wherever_it_is_tried() -> None:
    """One process of ours is Lightning's; what it refuses to save or load is another matter."""
    rows = {name: row for found in recorded().values() for name, row in found.items() if not name.endswith(LOADED)}
    cells = [row["single"] for row in rows.values() if "single" in row]
    assert set(cells) == {"equal"}


def test_pins_have_the_library_and_what_is_shared() -> None:
    """Else an installation could replace torch or Lightning."""
    for library in recorded():
        pinned = {line.partition("==")[0] for line in LIBRARIES[library].pins.read_text().splitlines()}
        assert pinned >= {LIBRARIES[library].name, *SHARED}


def test_a_library_with_strict_pins_is_installed_without_its_dependencies() -> None:
    """Its requests come with theirs; torch is always among these, so that pip takes no other."""
    environment = LIBRARIES["pytorch_tabular"]
    first, second = environment._commands("python")
    assert "pytorch-tabular" not in first
    assert {"einops", f"torch=={torch.__version__.partition('+')[0]}"} <= set(first)
    assert second[-2:] == ["--no-deps", "pytorch-tabular"]


def test_rows_of_a_module_cover_layouts_order_and_loading() -> None:
    whole, shuffled, loaded = rows_of("Module", dict, _no_loader, batch_norm=True)
    assert whole.layouts == ["single", "ddp", "zero2", "zero3", "tensor", "pipeline", "tensor x shard"]
    assert (shuffled.name, shuffled.layouts) == ("Module, shuffled", ["ddp", "zero3"])
    assert (loaded.name, loaded.layouts, loaded.late) == ("Module, loaded", ["single", "zero3"], True)
    assert whole.trainers["ddp"] == {"sync_batchnorm": True}
    assert "tensor" not in whole.trainers
    assert len(rows_of("Module", dict, _no_loader, loads=None)) == 2


def test_shuffled_order_is_that_of_our_trainer() -> None:
    """The reference reads the same global batches."""
    from trainwright.trainer.data.epoch_order import EpochOrder

    sampler = order(range(24), shuffled=True)
    assert list(order(range(24), shuffled=True)) == list(EpochOrder(sampler, 0).indices())
    assert list(order(range(24), shuffled=False)) == list(range(24))


def _no_loader(batch: int, shuffled: bool) -> None:
    """Never called."""
