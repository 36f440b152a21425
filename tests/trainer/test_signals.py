"""A signal that one rank gets ends all of them, at the same step."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer
from tests.parity.modules import Tokens, make_module


class ToldToEnd(pl.Callback):
    """Rank 1 gets a SIGTERM at the first occasion of its kind."""

    def __init__(self, hook: str) -> None:
        self.told = False
        setattr(self, hook, self.tell)

    def tell(self, *_: Any) -> None:
        if dist.get_rank() == 1 and not self.told:
            self.told = True
            os.kill(os.getpid(), signal.SIGTERM)


def step_at_the_end(hook: str) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning leaves a handler of the pool's in its place
    trainer = make_trainer("ddp", max_epochs=100, callbacks=[ToldToEnd(hook)])
    data = DataLoader(Tokens(), batch_size=12)
    with pytest.raises(SystemExit):
        trainer.fit(make_module("decoder-sgd"), data, data)
    return int(trainer.global_step)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_batch_end"])
def test_ranks_end_together(ranks, hook):
    steps = ranks(step_at_the_end, 2, hook, timeout=60)
    assert steps[0] == steps[1]
