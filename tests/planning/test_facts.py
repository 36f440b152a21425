"""Costs of a pass of a module, without a Trainer and without memory."""

import lightning.pytorch as pl
import pytest
import torch

from trainwright.planning.model.facts import ModelFacts
from trainwright.planning.model.fake_run import FactsError
from trainwright.planning.time.cost import ModelCut


class NeedsTrainer(pl.LightningModule):
    """A step that reads its Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).mean() * self.trainer.max_steps


def test_module_that_needs_a_trainer() -> None:
    with torch.device("meta"):
        module = NeedsTrainer()
    facts = ModelFacts(module, torch.zeros(2, 4), 2)
    with pytest.raises(FactsError, match="training_step of NeedsTrainer cannot be run without a Trainer"):
        facts.of(ModelCut())
