"""The task of every peer: the same model and weights, the same samples in the same order, the same loss.

The scripts in ``sides/`` import nothing else from this project but :mod:`benchmarks.peers.turns`, by which they are
measured. The task comes from an environment variable, so that each script stays as its documentation shows it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset

from benchmarks.peers.windows import Windows
from trainwright.recipes.gpt.model import GPT, GPTConfig

VARIABLE = "TRAINWRIGHT_BENCHMARK_PEERS_TASK"
"""Environment variable that holds a :class:`Task` as JSON."""

LR = 1e-3
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0


@dataclass(frozen=True)
class Task:
    """Workload and measured pieces.

    Args:
        sizes: arguments of ``GPTConfig``; the head is untied, so that every layout can be written by hand.
        batch: windows of an optimizer step, over all ranks.
        micro_batches: parts of a batch in a pipeline.
        device: ``"cpu"`` or ``"cuda"``.
        bf16: bfloat16 where the peer's mixed precision computes in it; ``False``: fp32.
        compile: ``torch.compile``.
        flash: no attention but flash attention may run (CUDA).
        data: a text file or folder; ``None``: the standard library's source.
        warm_up: optimizer steps before the first piece, besides the very first step.
        steps: optimizer steps of a piece.
        pieces: number of pieces; 0: the process ends with the first step.
    """

    sizes: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 8
    micro_batches: int = 4
    device: str = "cpu"
    bf16: bool = False
    compile: bool = False
    flash: bool = False
    data: str | None = None
    warm_up: int = 4
    steps: int = 8
    pieces: int = 6

    @property
    def config(self) -> GPTConfig:
        """Sizes of the model."""
        return GPTConfig(**{**self.sizes, "tied_head": False})

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Return the optimizer steps after which a process reports and waits: the first, the warm-up, each piece."""
        if not self.pieces:
            return (1,)
        begin = 1 + self.warm_up
        return (1, begin, *(begin + self.steps * (piece + 1) for piece in range(self.pieces)))

    @property
    def total(self) -> int:
        """Optimizer steps."""
        return self.boundaries[-1]

    def write(self) -> str:
        """The value of :data:`VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def given(cls) -> Task:
        """Return the task of this process from the environment; the defaults without the variable."""
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))


TASK = Task.given()


def restrict_attention() -> None:
    """No attention but flash attention, if the task says so; where it cannot run, torch says why."""
    if TASK.flash:
        torch.backends.cuda.enable_math_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


def device() -> torch.device:
    """Of this rank."""
    if TASK.device == "cpu":
        return torch.device("cpu")
    restrict_attention()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def build_model() -> GPT:
    """The model on the CPU, with the same weights in every process."""
    torch.manual_seed(0)
    return GPT(TASK.config)


def compiled(model: GPT) -> GPT:
    """The model with its blocks compiled in place, if the task says so; parameters keep their names."""
    if TASK.compile:
        for block in model.blocks:
            block.compile()
    return model


def windows() -> Subset[Tensor]:
    """The samples of all steps, ``(T + 1,)`` bytes each, already in a random order that is always the same."""
    whole = Windows(TASK.data, TASK.config.seq_len)
    order = torch.randint(len(whole), (TASK.batch * TASK.total,), generator=torch.Generator().manual_seed(1))
    return Subset(whole, order.tolist())


def loss_of(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:  # noqa: N803
    """Mean cross-entropy of logits against the ids that follow, computed in fp32."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), ids_BT.flatten())


def loss_on(model: nn.Module, windows_BT: Tensor) -> Tensor:  # noqa: N803
    """Loss of windows ``(B, T + 1)``."""
    ids = windows_BT.long()
    return loss_of(model(ids[:, :-1]), ids[:, 1:])
