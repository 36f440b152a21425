"""Tensor parallel under Lightning's ModelParallelStrategy: the module splits itself in ``configure_model``."""

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from benchmarks.peers.sides.lightning_turns import TurnsCallback  # bench
from benchmarks.peers.task import BETAS, CLIP, LR, TASK, WEIGHT_DECAY, build_model, compiled, loss_on, windows

PLAN = {
    **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
    **{name: RowwiseParallel() for name in ("attention.out", "feed_forward.down")},
}


class Module(pl.LightningModule):
    """The model, how it is split, its loss, its optimizer and its samples."""

    def configure_model(self):
        """Split."""
        mesh = self.device_mesh["tensor_parallel"]
        self.model = build_model()
        for block in self.model.blocks:
            parallelize_module(block, mesh, PLAN)
            block.attention.heads //= mesh.size()
            block.attention.kv_heads //= mesh.size()
        compiled(self.model)

    def training_step(self, batch, batch_idx):
        """Mean loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=TASK.bf16):
            return loss_on(self.model, batch)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        """Lightning's own takes no mixture of split and whole parameters."""
        gradients = [parameter.grad for parameter in self.parameters()]
        split = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        norm = (get_total_norm(split).full_tensor() ** 2 + get_total_norm(whole) ** 2).sqrt()
        factor = (CLIP / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([*whole, *(gradient.to_local() for gradient in split)], factor)

    def configure_optimizers(self):
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, foreach=False)

    def train_dataloader(self):
        """The same on all ranks."""
        return DataLoader(windows(), batch_size=TASK.batch)


ranks = int(sys.argv[2])
trainer = pl.Trainer(
    strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks),
    accelerator="gpu" if TASK.device == "cuda" else "cpu",
    devices=ranks,
    max_epochs=1,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[TurnsCallback()],  # bench
)
trainer.fit(Module())
