"""Two and more stages under torch's ``Schedule1F1B``, for torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from benchmarks.peers.task import BETAS, CLIP, LR, TASK, WEIGHT_DECAY, build_model, compiled, device, loss_of, windows
from benchmarks.peers.turns import Turns  # bench
from trainwright.recipes.gpt.model import rotary_angles


class Stage(nn.Module):
    """Some blocks of the model; the first stage has the embedding, the last one the norm and the head."""

    def __init__(self, whole, rank, ranks):
        super().__init__()
        size = len(whole.blocks) // ranks
        self.config = whole.config
        self.embedding = whole.embedding if rank == 0 else nn.Identity()
        self.blocks = whole.blocks[rank * size : (rank + 1) * size]
        self.norm = whole.norm if rank == ranks - 1 else nn.Identity()
        self.head = whole.head if rank == ranks - 1 else nn.Identity()

    def forward(self, x):
        """Ids to hidden states, those to those, or those to logits."""
        angles = rotary_angles(x.size(1), self.config.head_dim, self.config.rope_base, x.device)
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, *angles)
        return self.head(self.norm(x))


turns = Turns()  # bench
here = device()
dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
model = Stage(compiled(build_model().to(here)), rank, ranks)
stage = PipelineStage(model, rank, ranks, here)
schedule = Schedule1F1B(stage, TASK.micro_batches, loss_fn=loss_of)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)


def clip_gradients() -> None:
    """The norm is that of all stages."""
    square = get_total_norm([parameter.grad for parameter in model.parameters()]) ** 2
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, square.sqrt())


for batch in DataLoader(windows(), batch_size=TASK.batch):
    ids, losses = batch.to(here).long(), []
    with torch.autocast(here.type, torch.bfloat16, enabled=TASK.bf16):
        if rank == 0:
            schedule.step(ids[:, :-1].contiguous(), return_outputs=False)
        elif rank == ranks - 1:
            schedule.step(target=ids[:, 1:].contiguous(), losses=losses, return_outputs=False)
        else:
            schedule.step()
    clip_gradients()
    optimizer.step()
    optimizer.zero_grad()
    turns.step(torch.stack(losses).mean() if losses else None)  # bench
dist.destroy_process_group()
