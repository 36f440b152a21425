"""One optimizer step of the gpt recipe written by hand; alone or under torchrun."""

from __future__ import annotations

import os

import torch.distributed as dist

from benchmarks.peers.moment import write_moment
from benchmarks.peers.plain_gpt import PlainRun, PlainTraining
from trainwright.recipes.gpt.model import GPTConfig


def main() -> None:
    """Train one step."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    training = PlainTraining(PlainRun(GPTConfig(), "ddp" if several else "single"))
    training.train(1)
    write_moment()
    if several:
        del training  # a DDP object that outlives its group may abort the process
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
