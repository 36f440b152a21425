"""Live storages, counted while operations run."""

from types import SimpleNamespace

import torch

from trainwright.planning.model.counted_run import OperationCounter


def test_live_storages() -> None:
    run = SimpleNamespace(phase="first", in_backward=False, graded_bytes=0)
    counter = OperationCounter(run)  # type: ignore[arg-type]
    ignored = torch.ones(7)
    counter.ignore([ignored])
    with counter:
        kept = torch.ones(100)
        torch.ones(1000)
        assert (counter.now, counter.peak) == (400, 4400)
        view = kept[:50]
        ignored.add_(1)
        assert counter.now == 400
        counter.reset_peak()
        run.phase = "second"
        other = torch.ones(200)
        assert (counter.now, counter.peak) == (1200, 1200)
        assert counter.alive() == {"first": 400, "second": 800}
        del kept, other
        assert counter.now == 400, "a view holds it"
        del view
        assert counter.now == 0
    torch.ones(10)
    assert counter.peak == 1200
