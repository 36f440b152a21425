"""Hugging Face Accelerate, for torchrun; its own launcher starts only one process on the CPU."""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

from benchmarks.peers.task import BETAS, CLIP, LR, TASK, WEIGHT_DECAY, build_model, compiled, device, loss_on, windows
from benchmarks.peers.turns import Turns  # bench

turns = Turns()  # bench
device()  # bench
plugin = None
if sys.argv[1] in ("zero2", "zero3"):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=sys.argv[1] == "zero3",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
accelerator = Accelerator(cpu=TASK.device == "cpu", mixed_precision="bf16" if TASK.bf16 else "no", fsdp_plugin=plugin)
model = compiled(build_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
loader = DataLoader(windows(), batch_size=TASK.batch // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if plugin is not None and "FSDP" not in type(model).__name__:  # bench
    raise RuntimeError(f"Accelerate prepared {type(model).__name__}, not FSDP2, on {accelerator.device}")  # bench
for batch in loader:
    loss = loss_on(model, batch)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    turns.step(loss)  # bench
del model
accelerator.end_training()
