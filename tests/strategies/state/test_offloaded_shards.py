"""Offloaded parts stay in host memory beside a mesh of GPUs, which this machine need not have."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainwright.strategies.data.sharding.gathering import computing_device
from trainwright.strategies.state.shards import ParameterShard, spread_like


def parts_of_a_mesh_of_gpus() -> tuple[list[str], list[int]]:
    ranks = torch.arange(dist.get_world_size())
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh=ranks, mesh_dim_names=("shard",))
    shard = ParameterShard(nn.Parameter(torch.ones(6, 3)), mesh, offload=True)
    shard.add_gradient(torch.ones(3, 3))
    state = spread_like(shard.optimized, torch.zeros(3, 3))
    assert isinstance(state, DTensor)
    offloaded = nn.Module()
    offloaded.weight = shard.optimized
    assert computing_device(offloaded).type == "cuda"
    found = [shard.optimized, shard.optimized.grad, state]
    return [each.to_local().device.type for each in found], list(state.shape)


def test_parts_and_state_stay_in_host_memory(ranks: Any) -> None:
    for devices, shape in ranks(parts_of_a_mesh_of_gpus, 2):
        assert devices == ["cpu"] * 3
        assert shape == [6, 3]
