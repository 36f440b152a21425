"""Optimizer steps on local tensors: bit-exact, DTensors to callers, and restored after a failed step."""

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

from trainwright.strategies.base.optimizer_probe import study
from trainwright.strategies.data.optimizers.part_steps import PartSteps

STEPS = 4
# The second is not divisible by two ranks.
SHAPES = ((4, 3), (5,), (1, 2), ())


class Wrapped(torch.optim.SGD):
    """Calls the step of its base class, so that torch runs step hooks twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adam foreach": (torch.optim.Adam, {"foreach": True}),
    "adamw": (torch.optim.AdamW, {"maximize": True}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "sgd": (Wrapped, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "rprop": (torch.optim.Rprop, {}),
}


def _trained(case: str, split: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return gathered parameters and tensors of their state."""
    kind, options = CASES[case]
    mesh, generator = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), torch.Generator().manual_seed(0)

    def made(shape: tuple[int, ...]) -> Tensor:
        whole = torch.randn(shape, generator=generator)
        return distribute_tensor(whole, mesh, [Shard(0) if whole.dim() else Replicate()]) if split else whole

    parameters = [nn.Parameter(made(shape)) for shape in SHAPES]
    unused = nn.Parameter(torch.ones(3))
    optimizer = kind([{"params": parameters[:2]}, {"params": [*parameters[2:], unused], "lr": 0.05}], **options)
    if split:
        PartSteps().attach(optimizer)
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = made(tuple(parameter.shape))
        held = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.step()
        assert all(a is b for a, b in zip(held, [*parameters, unused], strict=True))
    states = {f"{i}.{name}": t for i, p in enumerate(parameters) for name, t in optimizer.state[p].items()}
    like = {name: t for name, t in states.items() if isinstance(t, Tensor) and t.dim()}
    assert all(isinstance(t, DTensor) == split for t in like.values())
    return [_whole(p.detach()) for p in parameters], {name: _whole(t) for name, t in like.items()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _twice(case: str) -> Any:
    return _trained(case, True), _trained(case, False)


@pytest.mark.parametrize("case", CASES)
def test_part_steps_are_bit_exact(ranks: Callable[..., list[Any]], case: str) -> None:
    for (parameters, state), (own, own_state) in ranks(_twice, 2, case):
        assert all(torch.equal(a, b) for a, b in zip(parameters, own, strict=True))
        assert state.keys() == own_state.keys()
        assert state
        assert all(torch.equal(state[name], own_state[name]) for name in state)


class Fails(torch.optim.AdamW):
    """Fails in its third step, with exchanged tensors."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 3:
            assert not any(isinstance(p, DTensor) for p in self.state)
            raise RuntimeError("out of memory")
        return super().step(closure)


def _failed() -> bool:
    """Return whether the optimizer is restored after a failed step."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer, steps = Fails([parameter]), PartSteps()
    steps.attach(optimizer)
    parameter.grad = parameter.detach().clone()
    for _ in range(2):
        optimizer.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    steps.restore(optimizer)
    (held,), (state,) = optimizer.param_groups[0]["params"], optimizer.state.values()
    return held is parameter and parameter in optimizer.state and isinstance(state["exp_avg"], DTensor)


def test_a_failed_step_is_restored(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(_failed, 2) == [True, True]


def test_no_reference_cycle_through_the_optimizer() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    PartSteps().attach(optimizer)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


def test_a_trial_leaves_rates_that_are_tensors():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3, 2))], lr=torch.tensor(0.125))
    study(optimizer, lambda parameter: parameter.shape)
    assert optimizer.param_groups[0]["lr"] == 0.125
