"""Optimizers that step on local tensors: equal to the bit, DTensors to whoever looks, and what is left alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from trainwright.strategies.elementwise import step_on_local_tensors

STEPS = 4
# The second is not divisible: on two ranks the last has one row less.
SHAPES = ((4, 3), (5,), (1, 2), ())

CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adam foreach": (torch.optim.Adam, {"foreach": True}),
    "adamw": (torch.optim.AdamW, {"maximize": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
}


def _parameters(split: bool = True) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if not split:
        return [nn.Parameter(tensor) for tensor in whole]
    return [nn.Parameter(distribute_tensor(t, mesh, [Shard(0) if t.dim() else Replicate()])) for t in whole]


def _trained(case: str, prepare: Callable[[Optimizer], None]) -> tuple[list[Tensor], dict[str, Tensor], bool]:
    """Local parts of the parameters, local parts of the state, and whether the state is split as the parameters are."""
    kind, options = CASES[case]
    parameters = _parameters()
    # Two groups, of which the second has a parameter that gets no gradient.
    unused = nn.Parameter(parameters[0].detach().clone())
    optimizer = kind([{"params": parameters[:2]}, {"params": [*parameters[2:], unused], "lr": 0.05}], **options)
    prepare(optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizer.step()
    states = {f"{i}.{name}": t for i, p in enumerate(parameters) for name, t in optimizer.state[p].items()}
    split = all(isinstance(t, DTensor) for name, t in states.items() if not name.endswith(("step", "mu_product")))
    return [p._local_tensor.detach() for p in parameters], {n: _local(t) for n, t in states.items()}, split


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _twice(case: str) -> Any:
    return _trained(case, lambda optimizer: None), _trained(case, step_on_local_tensors)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_bit(ranks: Callable[..., list[Any]], case: str) -> None:
    """Parameters and state are those of steps on DTensors, and the state is still made of DTensors."""
    for (parameters, state, split), (own, own_state, own_split) in ranks(_twice, 2, case):
        assert split
        assert own_split
        assert all(torch.equal(a, b) for a, b in zip(parameters, own, strict=True))
        assert state.keys() == own_state.keys()
        assert state
        assert all(torch.equal(state[name], own_state[name]) for name in state)


def _collected(layout: str) -> list[str]:
    """Types of what the optimizer steps on, in the second step, when it has all its state."""
    parameters = _parameters(split=layout != "whole")
    differentiable = layout == "differentiable"
    optimizer = torch.optim.AdamW(parameters, differentiable=differentiable)
    step_on_local_tensors(optimizer)
    for parameter in parameters:
        gradient = parameter.detach().clone()
        if layout == "gradients whole":
            gradient = gradient.redistribute(placements=[Replicate()])
        parameter.grad = gradient
    lists: list[list[Tensor]] = [[] for _ in range(6)]
    optimizer._init_group(optimizer.param_groups[0], *lists)
    return sorted({type(each).__name__ for tensors in lists for each in tensors})


@pytest.mark.parametrize(
    ("layout", "types"),
    [
        ("split", ["Tensor"]),
        ("whole", ["Parameter", "Tensor"]),
        ("gradients whole", ["DTensor", "Tensor"]),
        ("differentiable", ["DTensor", "Tensor"]),
    ],
)
def test_what_is_stepped_on(ranks: Callable[..., list[Any]], layout: str, types: list[str]) -> None:
    """No DTensor is dispatched where parts lie alike; where they do not, DTensors see to it as before."""
    assert ranks(_collected, 2, layout) == [types, types]


class _Normed(torch.optim.AdamW):
    """May look at norms of whole parameters."""


@pytest.mark.parametrize("kind", [_Normed, torch.optim.SGD, torch.optim.Muon, torch.optim.LBFGS])
def test_others_stay_as_they_are(kind: type[Optimizer]) -> None:
    """Subclasses, and optimizers that look at shapes or write back by parameter."""
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
    before = dict(vars(optimizer))
    step_on_local_tensors(optimizer)
    assert vars(optimizer) == before


def test_an_optimizer_goes_with_its_last_reference() -> None:
    """Its state is not kept until Python's collector comes by."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    step_on_local_tensors(optimizer)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
