"""Optimizer state in tensor subclasses: trained as on one process, saved, and resumed under another strategy."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Trainer
from trainwright.callbacks.guard.replica_check import ReplicaCheck
from trainwright.core.errors import CheckpointError
from trainwright.strategies.state.wrapped_tensors import flattened, is_wrapped, plain_tensors, rebuilt

SAVED, STEPS = 2, 4


class Autoencoder(pl.LightningModule):
    """Its matrices are large enough for 8-bit state, which its biases do not get."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.layers(batch[0]) - batch[0].flip(-1)).square().mean()

    def configure_optimizers(self) -> Any:
        from torchao.optim import AdamW8bit

        return AdamW8bit(self.parameters(), lr=1e-2)


def train(strategy: str, devices: int, steps: int, resume: Path | None, save: Path | None) -> dict[str, torch.Tensor]:
    torch.compiler.set_stance("force_eager")  # compiling takes a minute
    torch.manual_seed(0)
    module = Autoencoder()
    loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=4)
    callbacks = [ReplicaCheck(every_n_steps=1)] if strategy == "ddp" else []
    trainer = Trainer(
        strategy=strategy, devices=devices, callbacks=callbacks, accelerator="cpu", global_batch_size=8,
        max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader, ckpt_path=resume, weights_only=resume is not None)
    held = [value for state in trainer.optimizers[0].state.values() for value in state.values() if is_wrapped(value)]
    assert held or strategy in ("zero3", "pipeline")  # one rank of two may own both matrices
    if strategy == "single":  # two moments of a byte a number, a scale per 256, and what maps bytes to numbers
        numbers = 2 * 64 * 128
        assert 2 * numbers < trainer.strategy.measures.held_bytes().optimizer < 2.5 * numbers
    if save is not None:
        trainer.save_checkpoint(save)
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["zero3", "ddp", "tensor", "pipeline"])
def test_eight_bit_state_resumes_on_one_process(ranks, tmp_path, strategy):
    ranks(train, 2, strategy, 2, SAVED, None, tmp_path / "saved")
    [whole] = ranks(train, 1, "single", 1, STEPS, None, None)
    [resumed] = ranks(train, 1, "single", 1, STEPS, tmp_path / "saved", None)
    for name, tensor in whole.items():
        # A rounding of a gradient may move a quantized value by one level.
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=2e-4, msg=name)


def test_a_state_is_flattened_and_rebuilt():
    from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros((16, 256), signed=True)
    state.codes.copy_(torch.arange(4096).view(16, 256) % 256)
    again = rebuilt(flattened(state))
    assert type(again) is OptimState8bit
    assert torch.equal(again.dequantize(), state.dequantize())
    assert sum(each.nbytes for each in plain_tensors(state)) == 4096 + 16 * 4 + 256 * 4
    with pytest.raises(CheckpointError, match="os.system, which no imported library declares safe"):
        rebuilt({**flattened(state), "wrapper_class": "os.system"})
