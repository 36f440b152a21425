"""Proof that blocks compute the same when positions are split over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch.distributed as dist
from torch import nn

from trainwright.strategies.context.engine import ContextParallel, Method
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.plan.names import joined, starred
from trainwright.strategies.plan.proof.proof import UNIT, Proof
from trainwright.strategies.plan.proof.trace import calls_for, kinds_of, trace


def sequence_problems(module: nn.Module, plan: ModelPlan, size: int, method: Method) -> list[str]:
    """Return problems of blocks, once per kind, that compute something different on a part of the sequence.

    Blocks that cannot be run alone are left to the checks of the first step.

    Args:
        module: the whole model, possibly on the meta device.
        plan: its blocks.
        size: of the context axis.
        method: of attention; ``ring`` is replaced by ``gather``, which computes the same.
    """
    seen = trace(module, plan.blocks, size)
    problems = []
    for first, *_ in kinds_of(module, plan.blocks):
        block = module.get_submodule(first)
        guesses = (call for call in calls_for(block, size) if call.tensors()[0].ndim > 2)  # of (B, T, width)
        for call in [seen.calls[first]] if first in seen.calls else guesses:
            with suppress(Exception):  # the call does not fit
                proof = Proof(block, [call], size)
                problems += _problem(proof, first, size, "gather" if method == "ring" else method)
                break
    return list(dict.fromkeys(problems))


def _problem(proof: Proof, name: str, size: int, method: Method) -> list[str]:
    def split(module: nn.Module, group: dist.ProcessGroup) -> Mapping[str, Cut]:
        block = module.get_submodule(UNIT)
        ContextParallel(module, [block], group, method=method, balance=False, enters=True, leaves=True).apply()
        return {}

    verdict = proof.of(split, averaged=True)
    if verdict.problem is None:
        return []
    where = starred(joined(name, verdict.mixing or ""))
    return [
        f"context={size}: {where} does not compute the same on a part of the sequence ({verdict.problem}). Allowed in "
        "blocks is what works on each position alone (dim 1 of hidden states) and F.scaled_dot_product_attention; use "
        "context=1, or move what mixes positions out of the blocks"
    ]
