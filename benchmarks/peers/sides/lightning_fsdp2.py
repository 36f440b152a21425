"""FSDP2 under Lightning's ModelParallelStrategy: the module shards itself in ``configure_model``."""

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.sides.lightning_turns import TurnsCallback  # bench
from benchmarks.peers.task import BETAS, CLIP, LR, TASK, WEIGHT_DECAY, build_model, compiled, loss_on, windows


class Module(pl.LightningModule):
    """The model, how it is sharded, its loss, its optimizer and its samples."""

    def configure_model(self):
        """Shard; ``zero2`` keeps parameters between passes."""
        options = {"mesh": self.device_mesh["data_parallel"], "reshard_after_forward": sys.argv[1] == "zero3"}
        if TASK.bf16:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model = compiled(build_model())
        for block in self.model.blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)

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


ranks = int(sys.argv[2])
trainer = pl.Trainer(
    strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
    accelerator="gpu" if TASK.device == "cuda" else "cpu",
    devices=ranks,
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
