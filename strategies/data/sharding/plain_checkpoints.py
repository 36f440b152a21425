"""Optimizer states in plain checkpoints, with parameters stepped by owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.strategies.data.optimizers.owners import Owners
from trainwright.strategies.state.run_state import OPTIMIZERS
from trainwright.strategies.state.wholes import shard_optimizer_state


def with_whole_states(
    checkpoint: dict[str, Any], optimizers: Sequence[Optimizer], name_of: Callable[[Tensor], str], owners: Owners | None
) -> dict[str, Any]:
    """Return a checkpoint completed by the optimizer states of other owners. A collective."""
    if owners is None or OPTIMIZERS not in checkpoint:
        return checkpoint
    states = []
    for optimizer, state in zip(optimizers, checkpoint[OPTIMIZERS], strict=True):
        names = dict(enumerate(name_of(p) for group in optimizer.param_groups for p in group["params"]))
        spread = {i: owners.spread(n, state["state"].get(i)) for i, n in names.items() if n in owners}
        found = {**state["state"], **{i: values for i, values in spread.items() if values is not None}}
        states.append({**state, "state": dict(sorted(found.items()))})
    return {**checkpoint, OPTIMIZERS: states}


def load_states(
    checkpoint: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    name_of: Callable[[Tensor], str],
    owners: Owners | None,
) -> None:
    """Load this rank's part of saved optimizer states, and the whole state of parameters it owns."""

    def is_mine(parameter: Tensor) -> bool | None:
        name = name_of(parameter)
        return None if owners is None or name not in owners else owners.is_mine(name)

    for optimizer, state in zip(optimizers, checkpoint[OPTIMIZERS], strict=True):
        optimizer.load_state_dict(shard_optimizer_state(optimizer, state, is_mine))
