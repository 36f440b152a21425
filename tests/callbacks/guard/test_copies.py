"""In-memory copies of the run state: schedule, sharing and lifetime."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from tests.callbacks.modules import QUIET, Regression, loader
from trainwright import Trainer
from trainwright.callbacks.guard.copies import CopySchedule
from trainwright.checkpoint.memory.snapshots import Snapshots
from trainwright.checkpoint.write.interval import young_daly


class Wants(Callback):
    """Requests copies and records the available ones after each step."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.steps: list[list[int]] = []
        self.last: Snapshots | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.copies.request(**self.options)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(trainer.copies.snapshots.steps())
        self.last = trainer.copies.snapshots


def copied(*wants: Wants, steps: int = 7) -> list[list[int]]:
    trainer = Trainer(strategy="single", max_steps=steps, callbacks=list(wants), **QUIET)
    trainer.fit(Regression(), loader(64))
    assert trainer.copies.snapshots.steps() == []
    return wants[0].steps


def test_every_n_steps() -> None:
    assert copied(Wants(every_n_steps=3)) == [[], [1], [1], [1], [4, 1], [4, 1], [4, 1]]
    assert copied(Wants(every_n_steps=3, at_once=True), steps=5) == [[0], [0], [0], [3, 0], [3, 0]]


def test_requests_share_copies() -> None:
    one, other = Wants(every_n_steps=4, keep=3), Wants(every_n_steps=2)
    assert copied(one, other)[-1] == [5, 3, 1]
    assert one.last is other.last


def test_given_memory_is_used() -> None:
    memory = Snapshots()
    copied(Wants(every_n_steps=2, memory=memory), Wants(every_n_steps=5), steps=6)
    assert memory.steps() == [5, 3]


def test_no_request_no_copies() -> None:
    wants = Wants()
    wants.on_train_start = lambda *_: None  # type: ignore[method-assign]
    assert copied(wants, steps=2) == [[], []]


def test_optimal_interval() -> None:
    schedule = CopySchedule()
    schedule.add(mtbf=1.0, every_n_steps=None)
    schedule.record(1, 10.0, 13.0)  # the first copy allocates memory and is no estimate
    assert schedule.steps_to_next() == 1.0
    schedule.record(2, 13.5, 14.0)
    assert schedule.steps_to_next() == pytest.approx(young_daly(0.5, 3600.0) / 0.5)
    schedule.add(mtbf=1.0, every_n_steps=None)  # twice as many failures
    schedule.record(3, 14.5, 14.6)
    schedule.record(4, 15.1, 15.2)
    assert schedule.steps_to_next() == pytest.approx(young_daly(0.1, 1800.0) / 0.5)
    schedule.add(mtbf=None, every_n_steps=7)
    assert schedule.steps_to_next() == 7.0


def test_recovery_time_is_not_step_time() -> None:
    schedule = CopySchedule()
    schedule.add(mtbf=1.0, every_n_steps=None)
    schedule.record(1, 0.0, 0.1)
    schedule.record(2, 1.1, 1.2)
    wanted = schedule.steps_to_next()
    schedule.pause()
    schedule.record(3, 1000.0, 1000.1)
    assert schedule.steps_to_next() == pytest.approx(wanted)


def differently_dear(mtbf: float) -> list[int]:
    """Return the copied steps where a copy costs more on rank 1."""

    class Dear(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            torch.linalg.svd(torch.rand(100 * dist.get_rank() + 2, 100 * dist.get_rank() + 2))

    memory = Snapshots(keep=50)
    callbacks = [Dear(), Wants(mtbf=mtbf, memory=memory)]
    trainer = Trainer(strategy="ddp", devices=2, max_steps=20, callbacks=callbacks, **QUIET)
    trainer.fit(Regression(), loader(200))
    return memory.steps()


def test_ranks_agree_on_interval(ranks: Any) -> None:
    first, second = ranks(differently_dear, 2, 1e-5)
    assert first == second
    assert len(first) > 1


def taken_in() -> list[list[int]]:
    """Resume from a copy in memory that one rank has lost."""
    memory = Snapshots()
    for last in (2, 4):
        held = memory.newest()
        if held is not None and dist.get_rank() == 1:
            memory = Snapshots()
        wants = Wants(every_n_steps=1, at_once=True, memory=memory)
        trainer = Trainer(strategy="ddp", devices=2, max_steps=last, callbacks=[wants], **QUIET)
        trainer.fit(Regression(), loader(200), ckpt_path=held)
    return wants.steps


def test_ranks_copy_together_after_one_lost_memory(ranks: Any) -> None:
    assert ranks(taken_in, 2) == [[[1, 0], [2, 1], [3, 2]], [[1], [2, 1], [3, 2]]]
