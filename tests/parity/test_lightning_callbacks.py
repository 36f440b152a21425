"""Lightning's callbacks behave on several ranks as on one."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, LearningRateFinder, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer
from tests.parity.layout_modules import LanguageModel
from tests.parity.layouts import Texts
from trainwright.checkpoint.exchange.groups import default_store
from trainwright.strategies.contract.groups import wait_for_key
from trainwright.trainer import trainer as trainer_module
from trainwright.trainer.trainer import all_are_interrupted


class Tuned(LanguageModel):
    """Has the attributes that these callbacks use."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__("gpt-untied")
        self.lr = 1e-3

    @property
    def backbone(self) -> nn.Module:
        return self.net.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def tune(strategy: str, options: dict[str, Any], finds_rate: bool) -> tuple[float, list[float]]:
    module, callback = Tuned(), BackboneFinetuning(1, verbose=False)
    if finds_rate:
        callback = LearningRateFinder(num_training_steps=20, min_lr=1e-4, max_lr=0.5)
    trainer = make_trainer(strategy, options, max_epochs=10 if finds_rate else 2, callbacks=[callback])
    trainer.fit(module, DataLoader(Texts(16), batch_size=8 // trainer.strategy.ranks.num_data_ranks))
    return module.lr, [weight.norm().item() for _, weight in trainer.strategy.whole_parameters()]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("strategy", "options", "world_size"), [("zero2", {}, 2), ("hybrid", {"pipeline": 2, "shard": 2}, 4)]
)
def test_finetuning(ranks: Any, reference: Any, strategy: str, options: dict[str, Any], world_size: int) -> None:
    """:class:`BaseFinetuning` itself is in tests/zoo/states.py."""
    _, expected = reference(tune, "single", {}, False, init_group=False)
    for _, weights in ranks(tune, world_size, strategy, options, False, timeout=60):
        assert weights == pytest.approx(expected, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
def test_the_learning_rate_finder(ranks: Any, strategy: str) -> None:
    found = ranks(tune, 2, strategy, {}, True)
    assert found[0][0] == found[1][0] != 1e-3
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)


class Fails(Tuned):
    """Raises on some ranks, and later on the others."""

    def __init__(self, failing: int) -> None:
        super().__init__()
        self.failing = failing

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and dist.get_rank() >= self.failing:
            wait_for_key(default_store(), "failed")
        if batch_idx == 1:
            raise ValueError("no more")
        return super().training_step(batch, batch_idx)


def fail(failing: int, folder: str) -> list[str]:
    saver = OnExceptionCheckpoint(folder, "last")
    trainer = make_trainer("ddp", max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        soon = partial(all_are_interrupted, seconds=2.0)
        with patch.object(trainer_module, "all_are_interrupted", soon), pytest.raises(ValueError, match="no more"):
            trainer.fit(Fails(failing), DataLoader(Texts(16), batch_size=4))
    default_store().set("failed", "")
    return [str(each.message) for each in caught if "No checkpoint is saved" in str(each.message)]


@pytest.mark.parametrize("failing", [1, 2])
def test_an_exception_on_one_rank_hangs_no_other(ranks: Any, tmp_path: Path, failing: int) -> None:
    warned = ranks(fail, 2, failing, str(tmp_path), timeout=60)
    assert (tmp_path / "last.ckpt").exists() == (failing == 2)
    assert [bool(each) for each in warned] == [failing == 1] * 2, warned
