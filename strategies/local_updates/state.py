"""Run states of replicas that differ.

Under the parameter names there are the means over replicas, which any strategy can resume from. Beside them:

========================  ========================================================================================
``outer/<name>/common``   the common parameters, laid out as weights
``outer/<name>/momentum`` the momentum of the outer optimizer, likewise
``inner/<rank>/...``      one rank's own state: its replica's weights, float buffers, optimizer states, loss scale
                          and compression residual
========================  ========================================================================================

``outer`` can be read under any layout, ``inner`` only under the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.local_updates.mean import ReplicaMean
from trainwright.strategies.local_updates.outer import OuterParameters
from trainwright.strategies.state.placement import Placement
from trainwright.strategies.state.run_state import OPTIMIZERS, WEIGHTS
from trainwright.strategies.state.shards import spread_like

# Prefixes of keys.
INNER, OUTER = "inner/", "outer/"
_COMMON, _MOMENTUM = "common", "momentum"


def float_buffers(module: nn.Module, others: bool = False) -> dict[str, Tensor]:
    """Return persistent floating-point buffers (running statistics) by name; or the ``others``."""
    found = {}
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            kept = name not in part._non_persistent_buffers_set
            if buffer is not None and kept and buffer.is_floating_point() != others:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def optimizer_tensors(optimizers: Sequence[Optimizer], name_of: Callable[[Tensor], str]) -> dict[str, Tensor]:
    """Return this rank's part of optimizer state tensors: ``<index>/<parameter>/<key>`` -> tensor."""
    return {
        f"{index}/{name_of(parameter)}/{key}": local_tensor(value).detach()
        for index, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def averages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer states that can be averaged: floating-point tensors, not step counts."""
    return {key: value for key, value in tensors.items() if value.is_floating_point() and value.dim() > 0}


# ---- means instead of one replica's state ----------------------------------------------------------------------------


def with_means(
    checkpoint: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    optimized: Mapping[str, Tensor],
    canonical: Mapping[str, str],
) -> dict[str, Any]:
    """Return a checkpoint with other values of the module's tensors.

    Args:
        checkpoint: Lightning's checkpoint dict.
        weights: this rank's part of parameters, and buffers, by name.
        optimized: what an optimizer holds in place of a parameter, by name.
        canonical: every name of a parameter -> its first name, for tied ones.
    """
    if WEIGHTS not in checkpoint:
        return dict(checkpoint)
    made = {name: spread_like(optimized.get(name, value), value) for name, value in weights.items()}
    state = checkpoint[WEIGHTS].copy()
    for name in state:
        first = canonical.get(name, name)
        if first in made:
            state[name] = made[first]
    return {**checkpoint, WEIGHTS: state}


def with_mean_states(
    checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer], name_of: Callable[[Tensor], str], mean: ReplicaMean
) -> dict[str, Any]:
    """Return a checkpoint with optimizer states averaged over replicas. A collective.

    States missing on a replica (one has skipped the first step) are left out.
    """
    if OPTIMIZERS not in checkpoint:
        return dict(checkpoint)
    held = averages(optimizer_tensors(optimizers, name_of))
    shared = mean.common(list(held))
    means = mean.of({key: held[key] for key in shared})
    states = []
    for index, (optimizer, state) in enumerate(zip(optimizers, checkpoint[OPTIMIZERS], strict=True)):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        values = {
            position: dict(_mean_values(of_one, f"{index}/{name_of(parameters[position])}", means))
            for position, of_one in state["state"].items()
        }
        states.append({**state, "state": {position: of_one for position, of_one in values.items() if of_one}})
    return {**checkpoint, OPTIMIZERS: states}


def _mean_values(values: Mapping[str, Any], path: str, means: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """Yield the values of one parameter; none if a replica lacks them."""
    expected = {key for key, value in values.items() if isinstance(value, Tensor) and _has_mean(value)}
    if any(f"{path}/{key}" not in means for key in expected):
        return
    for key, value in values.items():
        yield key, spread_like(value, means[f"{path}/{key}"]) if key in expected else value


def _has_mean(value: Tensor) -> bool:
    return bool(averages({"": local_tensor(value)}))


# ---- the outer optimizer ---------------------------------------------------------------------------------------------


def outer_boxes(
    outer: OuterParameters, placement: Placement, optimized: Mapping[str, Tensor]
) -> dict[str, TensorParts]:
    """Return boxes of common parameters and momentum, by key; views."""
    kinds = ((_COMMON, outer.common()), (_MOMENTUM, outer.momentum()))
    return {
        f"{OUTER}{name}/{kind}": placement.boxes(name, spread_like(optimized[name], tensor))
        for kind, tensors in kinds
        for name, tensor in tensors.items()
    }


def read_outer(source: Any, outer: OuterParameters, placement: Placement, optimized: Mapping[str, Tensor]) -> bool:
    """Read common parameters and momentum in place; returns whether all were found."""
    stored, common = source.keys(), outer.common()
    if not all(f"{OUTER}{name}/{_COMMON}" in stored for name in common):
        return False
    outer.forget_momentum()
    for name in common:
        if f"{OUTER}{name}/{_MOMENTUM}" in stored:
            outer.make_momentum(name)
    boxes = outer_boxes(outer, placement, optimized)
    source.fill({key: parts for key, parts in boxes.items() if parts.parts})
    return True


# ---- state of one rank -----------------------------------------------------------------------------------------------


def inner_boxes(rank: int, tensors: Mapping[str, Tensor]) -> dict[str, TensorParts]:
    """Return boxes of one rank's tensors, by key."""
    return {f"{INNER}{rank}/{name}": TensorParts.whole(tensor) for name, tensor in tensors.items() if tensor.numel()}


def inner_keys(source: Any, rank: int | None) -> dict[str, str]:
    """Return name -> key of ``rank``'s own state; ``None``: of the only rank in the source."""
    prefix = INNER if rank is None else f"{INNER}{rank}/"
    return {key.removeprefix(INNER).partition("/")[2]: key for key in source.keys_under(prefix)}


def read_inner(source: Any, keys: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Read those of ``tensors`` that are in the source, in place."""
    wanted = {keys[name]: TensorParts.whole(t) for name, t in tensors.items() if name in keys and t.numel()}
    with torch.no_grad():
        source.fill(wanted)
