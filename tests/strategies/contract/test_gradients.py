"""Norms and clipping of gradients that are split, replicated, or both."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainwright.strategies.contract import groups
from trainwright.strategies.contract.gradients import (
    GradientScope,
    clip_gradient_norm,
    clip_gradient_value,
    gradient_norm,
)


def parameters_with_gradients() -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((7, 3), (5,), (2, 2), ())]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    parameters.append(nn.Parameter(torch.zeros(2)))  # without a gradient
    return parameters


def split_norm(how: str, max_norm: float) -> tuple[float, list[torch.Tensor | None]]:
    """Norm and clipped gradients when the first two gradients are split over the ranks and the others are whole."""
    parameters = parameters_with_gradients()
    shape = (dist.get_world_size(),) if how == "shard" else (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape)
    placements = [Shard(0)] if how == "shard" else [Replicate(), Shard(0)]
    for i in (0, 1):
        gradient = distribute_tensor(parameters[i].grad, mesh, placements)
        parameters[i] = nn.Parameter(distribute_tensor(parameters[i].detach(), mesh, placements))
        parameters[i].grad = gradient
    norm = clip_gradient_norm(parameters, max_norm)
    return norm.item(), [
        None if p.grad is None else p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for p in parameters
    ]


@pytest.mark.parametrize(("how", "world_size"), [("shard", 2), ("shard", 4), ("hybrid", 4)])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_sharded_clipping_matches_one_process(ranks, how, world_size, max_norm):
    whole = parameters_with_gradients()
    want = torch.nn.utils.clip_grad_norm_(whole, max_norm).item()
    for norm, gradients in ranks(split_norm, world_size, how, max_norm):
        assert norm == pytest.approx(want, rel=1e-6)
        for parameter, gradient in zip(whole, gradients, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            if gradient is not None:
                torch.testing.assert_close(gradient, parameter.grad)


def devices_of_sums() -> list[str]:
    """Where the parts of a norm are when they are summed up, in a group that sends from another device than theirs."""
    parameter = parameters_with_gradients()[0]
    mesh = init_device_mesh("cpu", (1,))
    parameter.grad = distribute_tensor(parameter.grad, mesh, [Shard(0)])
    scope = GradientScope(lambda _: (), lambda _: True, dist.group.WORLD)
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "device_of", lambda _: torch.device("meta"))
        patch.setattr(dist, "all_reduce", lambda tensor, **_: seen.append(tensor.device.type))
        gradient_norm([parameter], scope)
        gradient_norm([], scope)  # a stage of which everything is frozen
    return seen


def test_norms_are_reduced_on_the_group_device(ranks):
    """NCCL refuses tensors on the CPU, where offloaded gradients are, and the norm of none."""
    assert ranks(devices_of_sums, 1) == [["meta"] * 3]


def test_clip_by_value():
    parameters = parameters_with_gradients()
    clip_gradient_value(parameters, 0.1)
    assert max(p.grad.abs().max().item() for p in parameters[:-1]) <= 0.1 + 1e-7


def test_norm_without_gradients_is_zero():
    assert gradient_norm([nn.Parameter(torch.zeros(2))]).item() == 0


def test_error_if_nonfinite():
    parameters = parameters_with_gradients()
    parameters[0].grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match=r"norm of the gradients is inf.*error_if_nonfinite=False"):
        clip_gradient_norm(parameters, 1.0, error_if_nonfinite=True)
    clip_gradient_norm(parameters, 1.0)
