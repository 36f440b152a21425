"""Collectives of an optimizer step compared with theory; the loop adds none."""

from collections import Counter
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.parity.harness import CLIPPING, make_loader, make_trainer, world_size
from tests.parity.modules import make_module
from tests.strategies.contract.traffic import Collective, recorded
from trainwright import Preemption

GLOBAL_BATCH = 12
BLOCKS = 2
MODULE = "decoder-adamw"


class Span(pl.Callback):
    """Records the collectives of one optimizer step, including hooks up to the next."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.collectives: list[Collective] = []
        self._open = ExitStack()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        begins = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        if begins and trainer.global_step == self.step:
            self.collectives = self._open.enter_context(recorded())
        elif begins and trainer.global_step == self.step + 1:
            self._open.close()


def traffic_of_a_step(strategy: str, accumulation: int, clipping: str, options: dict[str, Any]) -> list[Collective]:
    # DDP rebuilds its buckets in the second step.
    span = Span(step=2)
    # Without time-based agreement on preemption, which could fall into this step.
    callbacks = [span, Preemption(check_seconds=1e6)]
    trainer = make_trainer(
        strategy, options, global_batch_size=GLOBAL_BATCH, max_epochs=1, callbacks=callbacks, **CLIPPING[clipping]
    )
    trainer.fit(make_module(MODULE), make_loader(48, GLOBAL_BATCH // (world_size() * accumulation)))
    return span.collectives


def large(collectives: list[Collective], ranks_used: int) -> Counter[str]:
    """Count the collectives of more than a scalar."""
    return Counter(c.name for c in collectives if c.elements > ranks_used**2)


def small(collectives: list[Collective], ranks_used: int) -> Counter[str]:
    """Count the collectives of a scalar."""
    return Counter(c.name for c in collectives if c.elements <= ranks_used**2)


def elements(collectives: list[Collective]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for collective in collectives:
        totals[collective.name] += collective.elements
    return totals


def padded(ranks_used: int) -> int:
    """Elements of all parameters, padded to a multiple of the ranks along dim 0; a scalar by sender and receiver."""
    return sum(
        -(-p.shape[0] // ranks_used) * ranks_used * p[0].numel() if p.dim() else ranks_used**2
        for p in make_module(MODULE).parameters()
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ranks_used", "clipping"), [(2, "off"), (2, "value"), (4, "norm")])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_traffic_of_a_step(ranks, ranks_used, accumulation, clipping):
    def measured(strategy: str, **options: Any) -> list[Collective]:
        return ranks(traffic_of_a_step, ranks_used, strategy, accumulation, clipping, options)[0]

    total = sum(p.numel() for p in make_module(MODULE).parameters())
    whole, norm = padded(ranks_used), Counter({"all_reduce": 1} if clipping == "norm" else {})

    ddp = measured("ddp")
    assert large(ddp, ranks_used) == {"all_reduce": 1}, "one bucket, once a step"
    assert elements(ddp) == {"all_reduce": total}
    assert small(ddp, ranks_used) == {}, "averaged gradients have the same norm everywhere"

    for stage, reductions in (("zero1", 1), ("zero2", accumulation)):
        zero = measured(stage)
        assert large(zero, ranks_used) == {"reduce_scatter": reductions, "all_gather": 1}
        assert elements([c for c in zero if c.elements > ranks_used**2]) == {
            "reduce_scatter": reductions * whole,
            "all_gather": whole,
        }
        assert small(zero, ranks_used) == norm

    zero3 = measured("zero3")
    gathers = accumulation * (2 * BLOCKS + 1)  # blocks in forward and in backward, the root once
    reductions = accumulation * (BLOCKS + 1)
    assert large(zero3, ranks_used) == {"all_gather": gathers, "reduce_scatter": reductions}
    moved = elements([c for c in zero3 if c.elements > ranks_used**2])
    assert moved["reduce_scatter"] == accumulation * (whole - ranks_used**2)
    assert moved["all_gather"] <= 2 * accumulation * (whole - ranks_used**2)
    scalar = Counter({"reduce_scatter": accumulation, "all_gather": 1})
    assert small(zero3, ranks_used) == scalar + norm


def test_no_sync_accumulation_reduces_once(ranks):
    options = {"no_sync_accumulation": True}
    zero2 = ranks(traffic_of_a_step, 2, "zero2", 3, "off", options)[0]
    assert large(zero2, 2) == {"reduce_scatter": 1, "all_gather": 1}
    zero3 = ranks(traffic_of_a_step, 2, "zero3", 3, "off", options)[0]
    assert large(zero3, 2) == {"all_gather": 3 * (2 * BLOCKS + 1), "reduce_scatter": BLOCKS + 1}


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_hybrid_averages_over_copies_once(ranks, accumulation):
    """Replicas all-reduce only shards, once per step regardless of accumulation."""
    options = {"replicate": 2, "shard": 2}
    for stage in ("zero1", "zero2", "zero3"):
        reduced = [
            c.elements
            for c in ranks(traffic_of_a_step, 4, stage, accumulation, "off", options)[0]
            if c.name == "all_reduce" and c.elements > 4
        ]
        assert len(reduced) == (BLOCKS + 1 if stage == "zero3" else 1)
        assert sum(reduced) <= padded(2) / 2


def test_buckets_split_the_traffic(ranks):
    one = ranks(traffic_of_a_step, 2, "zero2", 1, "off", {})[0]
    many = ranks(traffic_of_a_step, 2, "zero2", 1, "off", {"bucket_mib": 4e-3})[0]
    assert large(one, 2)["reduce_scatter"] == 1
    assert large(many, 2)["reduce_scatter"] >= 4
    assert elements(many) == elements(one)


class Silent(pl.Callback):
    """Records the collectives of a whole run except its setup."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self._open = ExitStack()

    def on_train_start(self, *args: Any) -> None:
        self.collectives = self._open.enter_context(recorded())

    def on_train_end(self, *args: Any) -> None:
        self._open.close()


def traffic_of_an_epoch(steps: int) -> list[Collective]:
    silent = Silent()
    # Without time-based agreement, whose number would depend on the machine.
    trainer = make_trainer("ddp", max_epochs=1, callbacks=[silent, Preemption(check_seconds=1e6)])
    trainer.fit(make_module("plain-sgd"), make_loader(2 * steps, 1))
    return silent.collectives


def test_loop_adds_no_collectives(ranks):
    """Apart from gradients there are only a few collectives per epoch, independent of its length."""
    others = [
        [c for c in ranks(traffic_of_an_epoch, 2, steps)[0] if c.name != "all_reduce" or c.elements <= 3]
        for steps in (20, 40)
    ]
    assert len(others[0]) == len(others[1]) <= 7, others
