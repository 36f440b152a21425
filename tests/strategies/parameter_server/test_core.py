"""Servers and workers as they are, without Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.parameter_server.core import Peer, flat, reference


def train(servers: int, kind: str, clip_norm: float | None, steps: int, rules: dict[str, Any]) -> Any:
    import torch.distributed as dist

    peer = Peer(dist.get_rank(), dist.get_world_size(), servers, kind, **rules)
    peer.begin()
    losses = [peer.step(step, clip_norm) for step in range(steps)]
    peer.client.meet()
    spread = 0 if peer.server is None else peer.server.largest_spread
    peer.end()
    return flat(peer.model), losses, spread


@pytest.mark.parametrize(("servers", "kind", "clip_norm"), [(1, "adamw", None), (2, "adamw", 0.3), (2, "sgd", None)])
def test_in_step_is_the_mean_of_all(ranks, servers, kind, clip_norm):
    results = ranks(train, 2, servers, kind, clip_norm, 6, {"consistency": "sync"})
    expected = reference(2, 6, kind, clip_norm)
    for parameters, _, _ in results:
        torch.testing.assert_close(parameters, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(results[0][0], results[1][0])
