"""DeepSpeed's engine with a stage of ZeRO, for its own launcher."""

import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.task import BETAS, CLIP, LR, TASK, WEIGHT_DECAY, build_model, compiled, device, loss_on, windows
from benchmarks.peers.turns import Turns  # bench

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int)
parser.add_argument("--local_rank", type=int)
stage = parser.parse_args().stage
here = device()
deepspeed.init_distributed("nccl" if here.type == "cuda" else "gloo")
turns = Turns()  # bench
ranks = deepspeed.comm.get_world_size()
config = {
    "train_micro_batch_size_per_gpu": TASK.batch // ranks,
    "gradient_clipping": CLIP,
    "bf16": {"enabled": TASK.bf16},
    "zero_optimization": {"stage": stage},
    "zero_allow_untested_optimizer": True,
}
model = compiled(build_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
data = windows()
sampler = DistributedSampler(data, shuffle=False)
for batch in DataLoader(data, batch_size=TASK.batch // ranks, sampler=sampler):
    loss = loss_on(engine, batch.to(here))
    engine.backward(loss)
    engine.step()
    turns.step(loss)  # bench
deepspeed.comm.destroy_process_group()
