"""Tensor parallel (``parallelize_module``) in plain torch, for torchrun."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from benchmarks.peers.task import BETAS, CLIP, LR, TASK, WEIGHT_DECAY, build_model, compiled, device, loss_on, windows
from benchmarks.peers.turns import Turns  # bench

turns = Turns()  # bench
here = device()
dist.init_process_group()
ranks = dist.get_world_size()
mesh = init_device_mesh(here.type, (ranks,))
plan = {
    **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
    **{name: RowwiseParallel() for name in ("attention.out", "feed_forward.down")},
}
model = build_model().to(here)
for block in model.blocks:
    parallelize_module(block, mesh, plan)
    block.attention.heads //= ranks
    block.attention.kv_heads //= ranks
compiled(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, foreach=False)


def clip_gradients() -> None:
    """``clip_grad_norm_`` takes no mixture of split and whole parameters."""
    gradients = [parameter.grad for parameter in model.parameters()]
    split = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    norm = (get_total_norm(split).full_tensor() ** 2 + get_total_norm(whole) ** 2).sqrt()
    torch._foreach_mul_([*whole, *(gradient.to_local() for gradient in split)], (CLIP / (norm + 1e-6)).clamp(max=1.0))


for batch in DataLoader(windows(), batch_size=TASK.batch):
    with torch.autocast(here.type, torch.bfloat16, enabled=TASK.bf16):
        loss = loss_on(model, batch.to(here))
    loss.backward()
    clip_gradients()
    optimizer.step()
    optimizer.zero_grad()
    turns.step(loss)  # bench
dist.destroy_process_group()
