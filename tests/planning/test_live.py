"""Storages that are alive, counted while operations run."""

from __future__ import annotations

import torch

from trainwright.planning.model.live import LiveCounter


def test_storages_count_while_they_are_there_as_large_as_they_are() -> None:
    counter = LiveCounter()
    with counter:
        kept = torch.ones(100)
        torch.ones(1000)
        assert (counter.now, counter.peak) == (400, 4400)
        view = kept[:50]
        assert counter.now == 400
        kept.untyped_storage().resize_(0)
        assert counter.now == 0
        counter.reset_peak()
        kept.untyped_storage().resize_(800)
        assert (counter.now, counter.peak) == (800, 800)
        del kept
        assert counter.now == 800, "a view holds it"
        del view
        assert counter.now == 0
    torch.ones(10).untyped_storage().resize_(0)
    assert counter.now == 0
