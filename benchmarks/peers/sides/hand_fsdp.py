"""FSDP2 (``fully_shard`` per block) in plain torch, for torchrun; ``zero2`` keeps parameters between passes."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.task import BETAS, CLIP, LR, TASK, WEIGHT_DECAY, build_model, compiled, device, loss_on, windows
from benchmarks.peers.turns import Turns  # bench

turns = Turns()  # bench
here = device()
dist.init_process_group()
mesh = init_device_mesh(here.type, (dist.get_world_size(),))
options = {"mesh": mesh, "reshard_after_forward": sys.argv[1] == "zero3"}
if TASK.bf16:
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = compiled(build_model().to(here))
for block in model.blocks:
    fully_shard(block, **options)
fully_shard(model, **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
data = windows()
sampler = DistributedSampler(data, shuffle=False)
for batch in DataLoader(data, batch_size=TASK.batch // dist.get_world_size(), sampler=sampler):
    loss = loss_on(model, batch.to(here))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    turns.step(loss)  # bench
dist.destroy_process_group()
