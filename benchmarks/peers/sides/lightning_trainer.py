"""Lightning's Trainer with a strategy of its own by name."""

import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.sides.lightning_turns import TurnsCallback  # bench
from benchmarks.peers.task import BETAS, CLIP, LR, TASK, WEIGHT_DECAY, build_model, compiled, loss_on, windows


class Module(pl.LightningModule):
    """The model, its loss, its optimizer and its samples."""

    def __init__(self):
        super().__init__()
        self.model = compiled(build_model())

    def training_step(self, batch, batch_idx):
        """Mean loss."""
        return loss_on(self.model, batch)

    def configure_optimizers(self):
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)

    def train_dataloader(self):
        """In order; Lightning's own sampler would shuffle."""
        data, ranks = windows(), self.trainer.world_size
        sampler = DistributedSampler(data, ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=TASK.batch // ranks, sampler=sampler)


strategy, devices = sys.argv[1], int(sys.argv[2])
trainer = pl.Trainer(
    strategy=strategy,
    accelerator="gpu" if TASK.device == "cuda" else "cpu",
    devices=devices,
    precision="bf16-mixed" if TASK.bf16 else "32-true",
    gradient_clip_val=CLIP,
    max_epochs=1,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[TurnsCallback()],  # bench
)
trainer.fit(Module())
