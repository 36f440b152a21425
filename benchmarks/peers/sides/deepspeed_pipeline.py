"""DeepSpeed's pipeline engine, for its own launcher."""

import argparse

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.peers.task import BETAS, CLIP, LR, TASK, WEIGHT_DECAY, build_model, compiled, device, loss_of, windows
from benchmarks.peers.turns import Turns  # bench
from trainwright.recipes.gpt.model import rotary_angles


class BlockLayer(nn.Module):
    """A block that finds the angles of its positions itself: layers of a pipeline hand on one tensor."""

    def __init__(self, block, config):
        super().__init__()
        self.block, self.config = block, config

    def forward(self, x):
        """Hidden states to hidden states."""
        return self.block(x, *rotary_angles(x.size(1), self.config.head_dim, self.config.rope_base, x.device))


def inputs_and_targets(samples):
    """Return the inputs of the first stage and the targets of the last one."""
    ids = torch.stack(samples).long()
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.parse_args()
here = device()
deepspeed.init_distributed("nccl" if here.type == "cuda" else "gloo")
turns = Turns()  # bench
config = {
    "train_micro_batch_size_per_gpu": TASK.batch // TASK.micro_batches,
    "gradient_accumulation_steps": TASK.micro_batches,
    "gradient_clipping": CLIP,
    "bf16": {"enabled": TASK.bf16},
    "zero_allow_untested_optimizer": True,
}
whole = compiled(build_model())
blocks = [BlockLayer(block, whole.config) for block in whole.blocks]
layers = [whole.embedding, *blocks, nn.Sequential(whole.norm, whole.head)]
ranks = deepspeed.comm.get_world_size()
model = PipelineModule(layers, num_stages=ranks, loss_fn=loss_of, partition_method="uniform")
parameters = list(model.parameters())
for parameter in parameters:
    parameter.model_parallel = True  # else the norm to clip by is that of the first stage's parameters alone
optimizer = torch.optim.AdamW(parameters, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
loader = DataLoader(windows(), batch_size=TASK.batch // TASK.micro_batches, collate_fn=inputs_and_targets)
iterator = iter(loader)
for _ in range(TASK.total):
    loss = engine.train_batch(iterator)
    turns.step(loss)  # bench
deepspeed.comm.destroy_process_group()
