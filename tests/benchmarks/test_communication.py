from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks.communication import AXES, measure_all
from benchmarks.traffic import Traffic
from trainwright.recipes.gpt_model import GPTConfig

SMALL = GPTConfig(layers=2, dim=32, heads=4, seq_len=16, tied_head=False)
# Not every method reaches its least: what else is sent does not grow with the number of blocks.
MOST = {"tensor, sequence": 1.15, "context, ring": 1.3, "context, ulysses": 1.3, "context, gather": 1.3, "expert": 1.15}


def collectives():
    x, out = torch.ones(8), torch.empty(16)
    with Traffic() as traffic:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(out, x)
        dist.reduce_scatter_tensor(x, out)
        dist.all_to_all_single(torch.empty(8), x)
        dist.all_to_all_single(
            torch.empty(8), x, [2, 6] if dist.get_rank() == 0 else [6, 2], [2, 6] if dist.get_rank() == 0 else [6, 2]
        )
        dist.broadcast(x, 1)
        dist.barrier()
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    return traffic.sent


def test_every_collective_counts_what_its_best_algorithm_sends(ranks):
    first, second = ranks(collectives, 2)
    assert second == {"all_reduce": 32, "all_gather": 32, "reduce_scatter": 32, "all_to_all": 16 + 24, "broadcast": 16}
    assert first == {**second, "send": 32}


def tensors_of_a_mesh():
    mesh = init_device_mesh("cpu", (2,))
    split = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    with Traffic() as traffic:
        split.redistribute(mesh, [Replicate()]).to_local()
    return traffic.sent


def test_collectives_of_dtensor_count(ranks):
    assert ranks(tensors_of_a_mesh, 2) == [{"all_gather": 16}] * 2


def test_axes_send_little_more_than_the_least(ranks):
    names = [name for name in AXES if " x " not in name]
    for row in ranks(measure_all, 2, names, SMALL, 4, timeout=60)[0]:
        assert 0.99 < row["ratio"] <= MOST.get(row["axis"], 1.01), row
        assert row["sent"] == pytest.approx(sum(row["by_kind"].values()), abs=4)
