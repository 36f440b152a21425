"""Lightning's Trainer with its FSDPStrategy."""

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.sides.lightning_turns import TurnsCallback  # bench
from benchmarks.peers.task import BETAS, CLIP, LR, TASK, WEIGHT_DECAY, build_model, compiled, loss_on, windows
from trainwright.recipes.gpt.model import Block


class Module(pl.LightningModule):
    """The model, its loss, its optimizer and its samples."""

    def __init__(self):
        super().__init__()
        self.model = compiled(build_model())

    def training_step(self, batch, batch_idx):
        """Mean loss."""
        return loss_on(self.model, batch)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        """FSDP's own; Lightning refuses to clip by norm here."""
        self.trainer.strategy.model.clip_grad_norm_(CLIP)

    def configure_optimizers(self):
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)

    def train_dataloader(self):
        """In order; Lightning's own sampler would shuffle."""
        data, ranks = windows(), self.trainer.world_size
        sampler = DistributedSampler(data, ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=TASK.batch // ranks, sampler=sampler)


sharding = {"zero2": "SHARD_GRAD_OP", "zero3": "FULL_SHARD"}[sys.argv[1]]
trainer = pl.Trainer(
    strategy=FSDPStrategy(auto_wrap_policy={Block}, sharding_strategy=sharding),
    accelerator="gpu" if TASK.device == "cuda" else "cpu",
    devices=int(sys.argv[2]),
    precision="bf16-mixed" if TASK.bf16 else "32-true",
    max_epochs=1,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[TurnsCallback()],  # bench
)
trainer.fit(Module())
