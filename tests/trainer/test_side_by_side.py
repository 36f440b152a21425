"""Training loaders read side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from tests.fuzz.data import Vectors
from tests.fuzz.program import Program, make_module
from tests.parity.harness import make_trainer


def fit(mode: str, sizes: tuple[int, int]) -> int:
    """Train on two loaders of so many samples; return the steps."""
    loaders = {
        name: DataLoader(Vectors(size, None, torch.float32), batch_size=4)
        for name, size in zip("ab", sizes, strict=True)
    }
    trainer = make_trainer("ddp", max_epochs=1)
    trainer.fit(make_module(Program(double=False)), CombinedLoader(loaders, mode))
    return int(trainer.global_step)


@pytest.mark.parametrize(
    ("mode", "sizes", "steps"), [("max_size_cycle", (16, 8), 2), ("max_size", (19, 16), 3), ("min_size", (19, 16), 2)]
)
def test_shares_of_samples_are_those_of_all_loaders(ranks: Any, mode: str, sizes: tuple[int, int], steps: int) -> None:
    assert ranks(fit, 2, mode, sizes) == [steps, steps]


@pytest.mark.parametrize(("mode", "sizes"), [("max_size_cycle", (16, 13)), ("max_size", (16, 13))])
def test_other_shares_in_one_loader_are_refused(ranks: Any, mode: str, sizes: tuple[int, int]) -> None:
    with pytest.raises(Exception, match=r"in batch 1 this rank has other shares.*drop_last=True"):
        ranks(fit, 2, mode, sizes)
