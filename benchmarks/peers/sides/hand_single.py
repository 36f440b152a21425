"""One process, plain torch."""

import torch
from torch.utils.data import DataLoader

from benchmarks.peers.task import BETAS, CLIP, LR, TASK, WEIGHT_DECAY, build_model, compiled, device, loss_on, windows
from benchmarks.peers.turns import Turns  # bench

turns = Turns()  # bench
here = device()
model = compiled(build_model().to(here))
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
for batch in DataLoader(windows(), batch_size=TASK.batch):
    with torch.autocast(here.type, torch.bfloat16, enabled=TASK.bf16):
        loss = loss_on(model, batch.to(here))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    turns.step(loss)  # bench
