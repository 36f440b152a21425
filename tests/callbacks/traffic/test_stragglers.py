"""Detection of slow ranks and the reason, under several layouts."""

import random
import time
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from tests.callbacks.faulty import fit
from tests.callbacks.modules import Written
from tests.parity.layouts import Texts
from trainwright.callbacks import inject
from trainwright.callbacks.guard.loss_guard import LossGuard
from trainwright.callbacks.step_clock import KINDS
from trainwright.callbacks.traffic.stragglers import StepTimes, Straggler, Stragglers, find_stragglers
from trainwright.core.layout import Layout
from trainwright.strategies.contract.waits.waiting import Waits, _Interception

USUAL_WAIT = dist.Work.wait
LATE = 0.25  # seconds, far more than a step, also on a busy machine

LAYOUTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "ddp": ("ddp", {}, 2),
    "zero3": ("zero3", {}, 2),
    "tensor": ("hybrid", {"tensor": 2}, 2),
    "pipeline x shard": ("hybrid", {"pipeline": 2, "shard": 2, "stage": 1}, 4),
}


class Late(Callback):
    """One rank is slow in its forward pass, or in a hook."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank = rank
        self.how = how

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if dist.get_rank() == self.rank and self.how == "compute":
            step = pl_module.training_step
            pl_module.training_step = lambda batch, batch_idx: (time.sleep(LATE), step(batch, batch_idx))[1]

    def on_train_batch_end(self, *_: Any) -> None:
        if dist.get_rank() == self.rank and self.how == "hooks":
            time.sleep(LATE)


class LateTexts(Texts):
    """Texts that are slow to read on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(24)
        self.rank = rank

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if dist.get_rank() == self.rank:
            time.sleep(LATE / 4)  # for each of the four samples of its batch
        return super().__getitem__(index)


def watched(layout: str, how: str) -> tuple[list[StepTimes], list[Straggler], list[tuple[int, dict[str, float]]]]:
    strategy, options, world_size = LAYOUTS[layout]
    stragglers, late, written = Stragglers(every_n_steps=2), world_size - 1, Written()
    data = LateTexts(late) if how == "data" else None
    fit(strategy, options, Late(late, how), stragglers, steps=6, data=data, logger=written)
    assert dist.Work.wait is USUAL_WAIT  # hooks are removed
    return stragglers.latest, stragglers.stragglers, written.rows


@pytest.mark.parametrize(("layout", "how"), [
    *((layout, "compute") for layout in LAYOUTS), ("ddp", "data"), ("ddp", "hooks"),
])  # fmt: skip
def test_slow_rank_is_reported(ranks: Any, layout: str, how: str) -> None:
    world_size = LAYOUTS[layout][2]
    for times, found, rows in ranks(watched, world_size, layout, how):
        assert (found[0].rank, found[0].kind) == (world_size - 1, how)
        # Its peers wait for it in that time.
        assert times[0].waits > times[-1].waits + LATE / 3
        assert getattr(times[-1], how) > getattr(times[0], how) + LATE / 3
        assert [step for step, _ in rows] == [2, 4, 5]  # without the first step; the rest of a window at the end
        assert rows[-1][1]["straggler"] == world_size - 1
        assert rows[-1][1]["waits_seconds"] == pytest.approx(sum(each.waits for each in times) / len(times))


def times(**seconds: float) -> StepTimes:
    return StepTimes(**{"compute": 1.0, "data": 0.0, "hooks": 0.0, "waits": 0.0, **seconds})


def test_straggler_messages() -> None:
    ranks = [times(waits=0.8), times(waits=0.8), times(compute=1.8), times(waits=0.8)]
    [found] = find_stragglers(ranks, Layout(replicate=4), 0.1)
    assert str(found) == "rank 2 computes 1.8 x as long as the median of its peers (1800.0 ms, 1000.0 ms)"
    assert found.share == pytest.approx(0.8 / 1.8)

    ranks = [times(waits=0.7, data=0.1), times(data=0.8)]
    [found] = find_stragglers(ranks, None, 0.1)
    assert str(found) == "rank 1 waits for data 44 % of the time (the median of its peers: 6 %)"

    ranks = [times(hooks=1.0), times(waits=1.0)]
    [found] = find_stragglers(ranks, None, 0.1)
    assert str(found).startswith("rank 0 is in hooks of callbacks and the module for 50 % of the time")


def test_threshold() -> None:
    ranks = [times(waits=0.09), times(compute=1.09)]
    assert find_stragglers(ranks, None, 0.1) == []
    assert [each.rank for each in find_stragglers(ranks, None, 0.05)] == [1]


def test_pipeline_stages_differ() -> None:
    layout = Layout(pipeline=2, shard=2)
    even = [times(waits=2.0), times(waits=2.0), times(compute=3.0), times(compute=3.0)]
    assert find_stragglers(even, layout, 0.1) == []
    assert find_stragglers([times(waits=2.0), times(compute=3.0)], Layout(pipeline=2), 0.1) == []  # no peers
    uneven = [times(waits=2.0), times(waits=1.0, compute=2.0), times(compute=3.0), times(compute=3.0)]
    [found] = find_stragglers(uneven, layout, 0.1)
    assert str(found).startswith("rank 1 (pipeline 0, shard 1) computes 2.0 x")


def test_warning_on_change_only(recwarn: pytest.WarningsRecorder) -> None:
    watching = Stragglers()
    slow = Straggler(1, "", "compute", 2.0, 1.0, 2.0)
    for step, found in enumerate([[slow], [slow], [], [slow]]):
        watching.stragglers = found
        watching._warn(step)
    assert [str(each.message)[:7] for each in recwarn] == ["Step 0:", "Step 3:"]


def failing() -> bool:
    class Fails(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fit("ddp", {}, Stragglers(), Fails())
    return dist.Work.wait is USUAL_WAIT and not _Interception.active


def test_hooks_removed_after_error(ranks: Any) -> None:
    assert ranks(failing, 2) == [True, True]


def nested() -> tuple[float, float, bool]:
    outer, inner = Waits(torch.device("cpu")), Waits(torch.device("cpu"))
    if dist.get_rank() == 1:
        time.sleep(LATE)
    dist.barrier()
    inner.stop()
    inner.stop()
    dist.barrier()
    seconds = outer.spans.take()[""], inner.spans.take()[""]
    outer.stop()
    return *seconds, dist.Work.wait is USUAL_WAIT


def test_nested_waits(ranks: Any) -> None:
    (outer, inner, restored), _ = ranks(nested, 2)
    assert inner > 0.5 * LATE
    assert outer > 0.95 * inner, "what the inner one waits for, both wait for"
    assert restored


def test_window_restarts_after_rollback() -> None:
    watching, written = Stragglers(every_n_steps=2), Written()
    guard = LossGuard("rollback", snapshot_every_n_steps=2)
    fit("single", {}, guard, watching, inject.nan(rank=0, at_step=4), steps=8, logger=written)
    steps = [step for step, metrics in written.rows if "compute_seconds" in metrics]
    # One window before the NaN; then the first repeated step is excluded.
    assert steps[0] == 2
    assert len(steps) == len(set(steps)) > 1
    assert watching._clock is None
    [own] = watching.latest
    assert own.compute > 0
    assert own.waits == 0
    assert watching.stragglers == []


def test_peers_are_ranks_of_the_same_stage() -> None:
    draw = random.Random(3)
    layout = Layout(pipeline=2, shard=50)
    times = [StepTimes(draw.choice([1.0, 1.2, 1.7]), draw.random(), draw.random(), draw.random()) for _ in range(100)]
    found = {each.rank: each for each in find_stragglers(times, layout, 0.1)}
    for rank, own in enumerate(times):
        peers = [times[other] for other in range(100) if other != rank and other // 50 == rank // 50]
        behind = {kind: getattr(own, kind) - median(getattr(each, kind) for each in peers) for kind in KINDS}
        kind = max(KINDS, key=behind.__getitem__)
        assert (rank in found) == (behind[kind] / own.total >= 0.1)
        if rank in found:
            assert found[rank].kind == kind
            assert found[rank].own - found[rank].others == pytest.approx(behind[kind])
    shares = [each.share for each in find_stragglers(times, layout, 0.1)]
    assert shares == sorted(shares, reverse=True)
