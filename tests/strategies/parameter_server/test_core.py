"""Servers and workers without Lightning."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.strategies.parameter_server.core import Peer, flat, reference
from trainwright.core.run.peers import EndNotice
from trainwright.strategies.averaging.compression.names import codec_of
from trainwright.strategies.averaging.compression.options import CompressionChoice
from trainwright.strategies.contract.communication.meter import CommunicationMeter
from trainwright.strategies.parameter_server.messages.requests import request_size
from trainwright.strategies.parameter_server.messages.wire import FIXED
from trainwright.strategies.parameter_server.worker.client import ServerGoneError


def train(servers: int, kind: str, clip_norm: float | None, steps: int, rules: dict[str, Any]) -> Any:
    peer = Peer(dist.get_rank(), dist.get_world_size(), servers, kind, **rules)
    peer.begin()
    losses = []
    for step in range(steps):
        if step == steps - 1 and peer.client.worker == 1:
            peer.client.notice = lambda: EndNotice(15, 2.0)
        losses.append(peer.step(step, clip_norm))
        heard = peer.client.heard
        # The step with the notice is the last one of all workers.
        assert heard is None if step < steps - 1 else heard is not None and heard[::2] == (15, 0) and heard.age >= 2
    return peer.end(), losses


@pytest.mark.parametrize(("servers", "kind", "clip_norm"), [(1, "adamw", None), (2, "adamw", 0.3), (2, "sgd", None)])
def test_sync_averages_all_workers(ranks, servers, kind, clip_norm):
    results = ranks(train, 2, servers, kind, clip_norm, 6, {"consistency": "sync"})
    expected = reference(2, 6, kind, clip_norm)
    for parameters, _ in results:
        torch.testing.assert_close(parameters, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(results[0][0], results[1][0])


def overlapped_steps(least_numel: int | None, rules: dict[str, Any]) -> Any:
    """Make steps, skip one, and change gradients after backward."""
    rank = dist.get_rank()
    peer = Peer(rank, 2, servers=2, least_numel=least_numel, **rules)
    peer.begin()
    pushed, late = [], []

    def look(model: Any) -> None:
        pushed.append(peer.client.sent_bytes)

    def change(model: Any) -> None:
        look(model)
        model[2].weight.grad.data.mul_(2)
        model[0].bias.grad = None

    for step in range(6):
        if step == 2:  # a skipped step
            peer.client.begin()
            (peer.model[2](torch.ones(1, 7)).sum() * (rank + 1)).backward()
        before, alias = peer.client.sent_bytes, peer.model[2].weight.data if step == 5 else None
        peer.step(step, 0.3 if step > 3 else None, change if step in (1, 2) else look)
        pushed[-1] -= before
        weight, version = peer.model[2].weight, peer.model[2].weight._version
        with peer.client.watched():
            seen = weight.detach().clone()  # without a forward of its module
        late.append(weight._version > version)
        assert torch.equal(seen, weight)
        assert alias is None or torch.equal(alias, weight)
    parameters = peer.end()
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in peer.model.parameters())
    hooks += sum(len(part._forward_pre_hooks) for part in peer.model)
    return parameters, pushed, late, hooks


def test_overlapped_pushes_and_deferred_pulls_are_bit_exact(ranks):
    plain, early = (ranks(overlapped_steps, 2, numel, {"consistency": "sync"}) for numel in (None, 4))
    for (expected, *before, _), (parameters, *after, hooks) in zip(plain, early, strict=True):
        assert torch.equal(parameters, expected)
        assert not any(map(any, before))
        assert all(after[0])
        assert after[1] == [True] * 5 + [False]  # not deferred if another tensor shares the memory
        assert hooks == 0


def independent_steps(consistency: str) -> Any:
    """Rank 0 makes all steps before rank 1 starts."""
    rank = dist.get_rank()
    peer = Peer(rank, 2, consistency=consistency)
    peer.begin()
    if rank == 1:
        dist.barrier()
    for step in range(30):
        peer.step(step)
    if rank == 0:
        dist.barrier()
    return peer.end()


def test_async_workers_do_not_wait(ranks):
    first, second = ranks(independent_steps, 2, "async")
    assert torch.equal(first, second)


def write_values(order: tuple[int, int]) -> Any:
    """Both ranks write their parameters before a step; returns those of the servers, before and after the step."""
    rank = dist.get_rank()
    peer = Peer(rank, 2, servers=2, consistency="sync")
    peer.begin()
    found = []
    for _ in range(2):
        torch.nn.utils.vector_to_parameters(torch.full_like(flat(peer.model), rank + 1.0), peer.model.parameters())
        for writer in order:
            if rank == writer:
                peer.client.put()
            dist.barrier()
        peer.client.pull()
        found.append(flat(peer.model))
        dist.barrier()
        peer.step(0)
    peer.end()
    return torch.stack(found)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_written_values_of_the_first_worker_count(ranks, order):
    for found in ranks(write_values, 2, order):
        assert torch.equal(found, torch.ones_like(found))


def keep_bound(staleness: int) -> Any:
    """Three workers of different speeds."""
    rank = dist.get_rank()
    peer = Peer(rank, 3, servers=2, kind="sgd", consistency="ssp", staleness=staleness, delay_compensation=0.01)
    peer.begin()
    for step in range(20):
        time.sleep(0.004 * rank)
        peer.step(step)
    return peer.end(), -1 if peer.server is None else peer.server.services.largest_spread


def test_ssp_bounds_the_spread(ranks):
    results = ranks(keep_bound, 3, 2)
    spreads = [spread for _, spread in results[:2]]
    assert max(spreads) == 2  # fast workers did run ahead
    assert all(torch.equal(parameters, results[0][0]) for parameters, _ in results)


def push_coded(name: str, options: dict[str, Any]) -> Any:
    peer = Peer(dist.get_rank(), 2, servers=2, codec=codec_of(CompressionChoice(name, options)), consistency="sync")
    peer.begin()
    for step in range(6):
        peer.step(step)
    return peer.end(), peer.client.sent_bytes, peer.client.residuals


def test_compressed_pushes(ranks):
    parameters, sent, residuals = ranks(push_coded, 2, "topk", {"ratio": 1.0})[0]
    torch.testing.assert_close(parameters, reference(2, 6), rtol=1e-6, atol=1e-7)
    assert all(not residual.any() for residual in residuals)
    parameters, few, residuals = ranks(push_coded, 2, "int8", {})[0]
    assert few < sent / 4
    assert any(residual.any() for residual in residuals)
    assert not torch.equal(parameters, reference(2, 6))


def lose_server() -> Any:
    peer = Peer(dist.get_rank(), 2, consistency="sync")
    peer.begin()
    peer.step(0)
    if peer.server is not None:
        peer.client.drop()
        peer.server.close()
        return None
    with pytest.raises(ServerGoneError) as error:  # noqa: PT012 - in either step
        peer.step(1)
        peer.step(2)
    return str(error.value)


def test_error_of_a_lost_server(ranks):
    text = ranks(lose_server, 2)[1]
    assert all(words in text for words in ("Parameter server 0 is gone", "ckpt_path=last", "launch.max_restarts=3"))


def count() -> Any:
    peer = Peer(dist.get_rank(), 2, consistency="sync")
    peer.begin()
    dist.barrier()
    with CommunicationMeter() as meter:
        for step in range(3):
            peer.step(step)
        dist.barrier()
        counted = {kind: sent.bytes for (axis, kind), sent in meter.take().items() if axis == "server"}
    parameters = peer.end().nbytes
    return counted, 3 * (parameters + 8 * request_size(peer.plan, 0)), 3 * 2 * (parameters + 8 * FIXED)


def test_bytes_per_step(ranks):
    (with_server, pushed, pulled), (without, _, _) = ranks(count, 2)
    assert with_server == {"push": pushed, "pull": pulled}
    assert without == {"push": pushed}
