"""Parameters of a module, and the part of each that a rank holds by the rules of the strategies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from trainwright.core.layout import Layout
from trainwright.strategies.compose.rules import cuts_module
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.plan.names import inside_any
from trainwright.strategies.plan.tensor_rules import plan_splits

Shape = tuple[int, ...]


class Division(NamedTuple):
    """Division of parameters among ranks.

    Args:
        tensor, expert: sizes of these axes.
        ranks: sharing a copy of the state.
        stage: of ZeRO; 0 shards nothing (`ddp`, `single`).
        splits_parameters: whether FSDP2 shards parameters.
        is_alone: whether only the ranks that share a copy train the same parameters, in a layout that cuts the module.
    """

    tensor: int
    expert: int
    ranks: int
    stage: int
    splits_parameters: bool
    is_alone: bool

    @classmethod
    def of(cls, layout: Layout, stage: int) -> Division:
        """Return the division of a closed layout."""
        is_alone = cuts_module(layout) and layout.replicate == 1
        splits = stage == 3 and not (is_alone and layout.state_ranks == 1)
        return cls(layout.tensor, layout.expert, layout.state_ranks, stage, splits, is_alone)


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Args:
        name: of it.
        whole: on one process.
        dtype: in the run.
        is_expert: whether the expert axis divides it.
        dim: split by the tensor axis; ``None``: not split.
    """

    name: str
    whole: nn.Parameter
    dtype: torch.dtype
    is_expert: bool
    dim: int | None

    def shape(self, division: Division) -> Shape:
        """Return its shape on a rank before ZeRO shards it."""
        shape = list(self.whole.shape)
        if self.dim is not None:
            shape[self.dim] //= division.tensor
        if self.is_expert:
            shape[0] //= division.expert
        return tuple(shape)

    def ranks(self, division: Division) -> int:
        """Return the number of ranks that share a copy of its state."""
        return division.ranks // (division.expert if self.is_expert else 1)

    def shard(self, division: Division, index: int = 0) -> tuple[int, int, Shape]:
        """Return the elements of the parameter and its gradient on a rank, and the shape that the optimizer steps.

        Args:
            division: among ranks.
            index: of the rank among those that share a copy of the state; the first holds most.
        """
        shape, ranks = self.shape(division), self.ranks(division)
        numel, splits = math.prod(shape), division.splits_parameters
        if not division.stage or not shape or (division.is_alone and ranks == 1 and not splits):
            return numel, numel, shape
        rows, index = -(-shape[0] // ranks), index * ranks // division.ranks
        chunk = rows * math.prod(shape[1:])  # padded to the same length on the last ranks
        mine = min((index + 1) * rows, shape[0]) - min(index * rows, shape[0])
        return chunk if splits else numel, chunk, (mine, *shape[1:])


def weights_of(module: nn.Module, plan: ModelPlan, tensor: int, halves: bool) -> list[Weight]:
    """Return the parameters of a module, in order.

    Args:
        module: whole; may be on the meta device.
        plan: of the module.
        tensor: size of the tensor axis.
        halves: whether floating-point weights become bf16 (``precision=bf16-true``).
    """
    splits = plan_splits(module, plan) if tensor > 1 else {}
    aliases = dict(module.named_parameters(remove_duplicate=False))
    dims = {id(aliases[alias]): split.dim for alias, split in splits.items()}
    return [
        Weight(
            name,
            parameter,
            torch.bfloat16 if halves and parameter.is_floating_point() else parameter.dtype,
            inside_any(name, plan.experts),
            dims.get(id(parameter)),
        )
        for name, parameter in module.named_parameters()
    ]
