"""Copies of the run state in memory: when they are made, for whom, and how long they are kept."""

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
    """Asks for copies, and notes at the end of each step which there are."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.steps: list[list[int]] = []
        self.last: Snapshots | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.copies.want(**self.options)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(trainer.copies.snapshots.steps())
        self.last = trainer.copies.snapshots


def copied(*wants: Wants, steps: int = 7) -> list[list[int]]:
    trainer = Trainer(strategy="single", max_steps=steps, callbacks=list(wants), **QUIET)
    trainer.fit(Regression(), loader(64))
    assert trainer.copies.snapshots.steps() == []
    return wants[0].steps


def test_every_n_steps_from_the_first_on() -> None:
    assert copied(Wants(every_n_steps=3)) == [[], [1], [1], [1], [4, 1], [4, 1], [4, 1]]


def test_at_once() -> None:
    assert copied(Wants(every_n_steps=3, at_once=True), steps=5) == [[0], [0], [0], [3, 0], [3, 0]]


def test_those_who_want_copies_share_them() -> None:
    one, other = Wants(every_n_steps=4, keep=3), Wants(every_n_steps=2)
    assert copied(one, other)[-1] == [5, 3, 1]
    assert one.last is other.last


def test_memory_that_is_brought_along_is_kept() -> None:
    memory = Snapshots()
    copied(Wants(every_n_steps=2, memory=memory), Wants(every_n_steps=5), steps=6)
    assert memory.steps() == [5, 3]


def test_nobody_wants_any() -> None:
    wants = Wants()
    wants.on_train_start = lambda *_: None  # type: ignore[method-assign]
    assert copied(wants, steps=2) == [[], []]


def test_the_interval_is_the_one_that_loses_least_time() -> None:
    schedule = CopySchedule()
    schedule.add(mtbf=1.0, every_n_steps=None)
    schedule.took(1, 10.0, 13.0)  # makes the memory, which says nothing of later ones
    assert schedule.steps_to_next() == 1.0
    schedule.took(2, 13.5, 14.0)
    assert schedule.steps_to_next() == pytest.approx(young_daly(0.5, 3600.0) / 0.5)
    schedule.add(mtbf=1.0, every_n_steps=None)  # twice as many failures
    schedule.took(3, 14.5, 14.6)
    schedule.took(4, 15.1, 15.2)
    assert schedule.steps_to_next() == pytest.approx(young_daly(0.1, 1800.0) / 0.5)
    schedule.add(mtbf=None, every_n_steps=7)
    assert schedule.steps_to_next() == 7.0


def test_time_between_a_fault_and_going_on_is_not_that_of_steps() -> None:
    schedule = CopySchedule()
    schedule.add(mtbf=1.0, every_n_steps=None)
    schedule.took(1, 0.0, 0.1)
    schedule.took(2, 1.1, 1.2)
    wanted = schedule.steps_to_next()
    schedule.pause()
    schedule.took(3, 1000.0, 1000.1)
    assert schedule.steps_to_next() == pytest.approx(wanted)


def differently_dear(mtbf: float) -> list[int]:
    """Steps of which rank 0 and 1 hold copies, where a copy costs more on one."""

    class Dear(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            torch.linalg.svd(torch.rand(150 * dist.get_rank() + 2, 150 * dist.get_rank() + 2))

    memory = Snapshots(keep=50)
    callbacks = [Dear(), Wants(mtbf=mtbf, memory=memory)]
    trainer = Trainer(strategy="ddp", devices=2, max_steps=20, callbacks=callbacks, **QUIET)
    trainer.fit(Regression(), loader(200))
    return memory.steps()


def test_ranks_agree_where_a_copy_costs_more_on_one(ranks: Any) -> None:
    first, second = ranks(differently_dear, 2, 1e-5)
    assert first == second
    assert len(first) > 1


def taken_in() -> list[list[int]]:
    """A run that goes on from a copy in memory, where the memory of one rank is new."""
    memory = Snapshots()
    for last in (2, 4):
        held = memory.newest()
        if held is not None and dist.get_rank() == 1:
            memory = Snapshots()
        wants = Wants(every_n_steps=1, at_once=True, memory=memory)
        trainer = Trainer(strategy="ddp", devices=2, max_steps=last, callbacks=[wants], **QUIET)
        trainer.fit(Regression(), loader(200), ckpt_path=held)
    return wants.steps


def test_ranks_copy_together_whatever_each_has_in_memory(ranks: Any) -> None:
    assert ranks(taken_in, 2) == [[[1, 0], [2, 1], [3, 2]], [[1], [2, 1], [3, 2]]]
