"""Accelerate's plain loop with peft, alone or for torchrun."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.peers.sides.finetune.given import build_model, rows
from benchmarks.peers.task import BETAS, CLIP, LR, TASK
from benchmarks.peers.turns import Turns  # bench

turns = Turns()  # bench
accelerator = Accelerator(cpu=True)
model = build_model().train()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=0.0)
loader = DataLoader(rows(), batch_size=TASK.batch // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(**batch, use_cache=False).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(trained, CLIP)
    optimizer.step()
    optimizer.zero_grad()
    turns.step(loss)  # bench
del model
accelerator.end_training()
