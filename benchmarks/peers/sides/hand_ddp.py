"""DistributedDataParallel in plain torch, for torchrun."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.task import BETAS, CLIP, LR, TASK, WEIGHT_DECAY, build_model, compiled, device, loss_on, windows
from benchmarks.peers.turns import Turns  # bench

turns = Turns()  # bench
here = device()
dist.init_process_group()
model = DistributedDataParallel(compiled(build_model().to(here)), gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
data = windows()
sampler = DistributedSampler(data, shuffle=False)
for batch in DataLoader(data, batch_size=TASK.batch // dist.get_world_size(), sampler=sampler):
    with torch.autocast(here.type, torch.bfloat16, enabled=TASK.bf16):
        loss = loss_on(model, batch.to(here))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    turns.step(loss)  # bench
del model
dist.destroy_process_group()
