"""Means over replicas: equal results in all ways, and fewer bytes across nodes."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from tests.parity.harness import QUIET, Case, bare_loop, differences, train
from trainwright.core.layout import Layout
from trainwright.strategies.averaging.means import ReplicaMeans
from trainwright.strategies.contract.communication.calls import listen
from trainwright.strategies.contract.communication.meter import CommunicationMeter
from trainwright.strategies.contract.communication.options import (
    ALL_REDUCE,
    AVERAGES,
    HIERARCHICAL,
    IN_PARTS,
    average_misfits,
    copies_of_a_node,
)
from trainwright.strategies.data.ddp import DDPStrategy
from trainwright.strategies.data.options import DDPOptions
from trainwright.strategies.data.sharding.reducer import GradientReducer
from trainwright.strategies.state.shards import ParameterShard, ShardBucket
from trainwright.trainer.trainer import Trainer

BUCKETS = 4
NUMEL = 1002  # no multiple of four
TWO_NODES = {"average_by": HIERARCHICAL, "ranks_per_node": 2}


def averaged(layout: Layout) -> dict[str, tuple[Tensor, dict[Any, Any]]]:
    """Return way -> mean over all ranks, and what was sent for it."""
    means, found = ReplicaMeans(layout.groups("replicate"), copies_of_a_node(layout, 2)), {}
    for way in means.ways:
        mean = means.by(way)
        flat = torch.linspace(-1, 1, NUMEL) * (dist.get_rank() + 1)
        with CommunicationMeter(layout, means.names) as meter:
            mean(flat)
        found[way] = flat, meter.take()
    return found


def test_all_ways_agree_and_hierarchical_sends_less_across_nodes(ranks):
    results = ranks(averaged, 4, Layout(replicate=4))
    expected = torch.linspace(-1, 1, NUMEL) * 2.5
    for found in results:
        assert tuple(found) == AVERAGES
        for way, (flat, _) in found.items():
            torch.testing.assert_close(flat, expected)
            assert torch.equal(flat, results[0][way][0]), "the same bits everywhere"
    _, sent = results[0][ALL_REDUCE]
    flat_bytes = sent["replicate", "all_reduce"].bytes
    _, sent = results[0][HIERARCHICAL]
    nodes, per_node, size = 2, 2, 4 * NUMEL
    assert sent["replicate-across", "all_reduce"].bytes == pytest.approx(2 * (nodes - 1) / nodes * size / per_node)
    assert set(sent) == {
        ("replicate-within", "all_to_all"),
        ("replicate-across", "all_reduce"),
        ("replicate-within", "all_gather"),
    }
    # A flat ring may send all of it across nodes, hierarchical means only a rank's part.
    assert flat_bytes / sent["replicate-across", "all_reduce"].bytes == pytest.approx(3 / 4 * size * 2 / (size / 2))
    _, sent = results[0][IN_PARTS]
    assert sum(each.bytes for each in sent.values()) == pytest.approx(flat_bytes, rel=0.01)


def test_hierarchical_needs_several_replicas_on_several_nodes():
    assert copies_of_a_node(Layout(replicate=8), 4) == 4
    assert copies_of_a_node(Layout(pipeline=2, replicate=4, tensor=2), 4) == 2
    assert copies_of_a_node(Layout(replicate=2, shard=8), 8) == 1
    assert copies_of_a_node(Layout(replicate=6), 4) == 0
    assert average_misfits(HIERARCHICAL, 4, Layout(replicate=8)) == []
    for layout, why in (
        (Layout(shard=4), "there is only one"),
        (Layout(replicate=4), "one node holds all"),
        (Layout(replicate=2, shard=4), "averages within it already"),
        (Layout(replicate=6), "different numbers"),
    ):
        (problem,) = average_misfits(HIERARCHICAL, 4, layout)
        assert why in problem
        assert "strategy.average_by=hierarchical" in problem


def test_refusals():
    assert "did you mean hierarchical?" in next(DDPOptions(average_by="hierachical").problems())
    assert "compression=topk" in next(DDPOptions(average_by=IN_PARTS, compression="topk").problems())
    assert "has no effect" in next(DDPOptions(ranks_per_node=2).problems())
    assert list(DDPOptions(ranks_per_node=2, communication="auto").problems()) == []
    assert "at least 1" in next(DDPOptions(average_by=HIERARCHICAL, ranks_per_node=0).problems())
    with pytest.raises(ValueError, match="ddp_comm_hook both decide"):
        DDPStrategy(average_by=IN_PARTS, ddp_comm_hook=print)
    with pytest.raises(ValueError, match="by their own method"):
        DDPStrategy(average_by=IN_PARTS, compression="int8")


CASE = Case(accumulation=2, global_batch_size=16, clipping="norm", steps=3)
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {**TWO_NODES, "bucket_mib": 4e-3}),
    ("ddp", {"average_by": IN_PARTS, "find_unused_parameters": True}),
    ("zero1", {**TWO_NODES, "replicate": 4, "shard": 1}),
    ("zero2", {"average_by": IN_PARTS, "replicate": 2, "shard": 2, "offload": "optimizer"}),
    ("zero3", {"average_by": IN_PARTS, "replicate": 2, "shard": 2}),
    ("zero3", {**TWO_NODES, "replicate": 4, "shard": 1}),
    ("ddp", {"communication": "auto", "ranks_per_node": 2}),
    ("zero2", {"communication": "auto", "replicate": 4, "shard": 1, "ranks_per_node": 2}),
]


def trained() -> list[Any]:
    return [train(CASE, strategy, options) for strategy, options in RUNS]


def test_training_matches_one_process(ranks):
    expected = bare_loop(CASE)
    for records in ranks(trained, 4, timeout=120):
        for run, record in zip(RUNS, records, strict=True):
            assert differences(record, expected) == [], run


def held_while_sending() -> tuple[list[int], list[int]]:
    """Return live whole gradients at each reduce-scatter, and buckets in flight when one is packed."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(BUCKETS)))
    gradients: list[weakref.ref[Any]] = []
    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: gradients.append(weakref.ref(p.grad)))
    reducer = GradientReducer([ParameterShard(p, mesh) for p in layers.parameters()], mesh, bucket_bytes=1)
    alive, on_their_way = [], []
    pack = ShardBucket.pack_whole

    def packed(bucket: ShardBucket, tensors: Any) -> Tensor:
        on_their_way.append(len(reducer._launched))
        return pack(bucket, tensors)

    end = listen(lambda call: alive.append(sum(each() is not None for each in gradients)))
    ShardBucket.pack_whole = packed  # type: ignore[method-assign]
    try:
        layers(torch.ones(4, 8)).sum().backward()
    finally:
        ShardBucket.pack_whole = pack  # type: ignore[method-assign]
        end()
    reducer.detach()
    return alive, on_their_way


def test_buckets_in_flight_hold_their_memory_once(ranks):
    for alive, on_their_way in ranks(held_while_sending, 2):
        assert alive == [0] * BUCKETS, "gradients are gone when they are packed"
        assert on_their_way == [0] + [1] * (BUCKETS - 1), "room is made before the next is packed"


class _Row(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.seen = nn.Linear(4, 4), []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(self.layer.weight.detach().clone())
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def local_sgd_of_torch() -> list[Tensor]:
    """Return the weights before each of six steps and at the end; the last four are local."""
    state = PostLocalSGDState(process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=2)
    strategy = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=3)
    module = _Row()
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    Trainer(strategy=strategy, devices=2, max_steps=6, **QUIET).fit(module, DataLoader(rows, batch_size=1))
    return [*module.seen, module.layer.weight.detach()]


def test_models_are_averaged_by_lightning(ranks):
    first, second = ranks(local_sgd_of_torch, 2)
    equal = [torch.equal(own, other) for own, other in zip(first, second, strict=True)]
    assert equal == [True, True, True, True, False, False, True]  # averaged after the third and the sixth
