"""Run states written by one layout and resumed under another continue with the losses of an uninterrupted run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.parity.harness import Record, make_trainer
from tests.parity.layout_modules import make_module
from tests.parity.layouts import Texts, WholeRecorder
from trainwright.core.layout import Layout

SAVED_AT, STEPS = 3, 5  # four steps an epoch
GLOBAL_BATCH = 8
SAMPLES = 32


@dataclass(frozen=True)
class Place:
    """A strategy on a number of ranks."""

    name: str
    ranks: int
    strategy: str = "hybrid"
    options: dict[str, Any] = field(default_factory=dict)
    network: str = "gpt2-small"

    @property
    def data_ranks(self) -> int:
        axes = {k: v for k, v in self.options.items() if k in Layout().sizes or k == "expert"}
        return Layout(**{"shard": -1, **axes}).resolve(self.ranks).data_ranks


def fit(place: Place, steps: int, save_to: str | None = None, resume: str | None = None, spoil: bool = False) -> Record:
    recorder = WholeRecorder()
    callbacks: list[Any] = [recorder]
    if save_to is not None:
        callbacks.append(ModelCheckpoint(save_to, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1))
    trainer = make_trainer(
        place.strategy,
        dict(place.options),
        global_batch_size=GLOBAL_BATCH,
        data_seed=3,
        max_steps=steps,
        max_epochs=-1,
        callbacks=callbacks,
        enable_checkpointing=save_to is not None,
    )
    module = make_module(place.network, "adamw")
    if spoil:  # what is resumed must not depend on what it was built with
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1)
    loader = DataLoader(Texts(SAMPLES, 16), batch_size=max(GLOBAL_BATCH // place.data_ranks // 1, 1), shuffle=True)
    trainer.fit(module, loader, ckpt_path=resume)
    return recorder.record


PLACES = {
    place.name: place
    for place in (
        Place("single", 1, "single"),
        Place("ddp-2", 2, "ddp"),
        Place("zero1-2", 2, "zero1"),
        Place("zero2-4", 4, "zero2"),
        Place("zero3-2", 2, "zero3"),
        Place("tensor-2", 2, options={"tensor": 2, "shard": 1}),
        Place("pipeline-2", 2, options={"pipeline": 2, "shard": 1}),
        Place("pipeline2 x tensor2", 4, options={"pipeline": 2, "tensor": 2, "shard": 1}),
        Place("tensor2 x shard2", 4, options={"tensor": 2, "shard": 2}),
        Place("pipeline2 x shard2 x tensor2", 8, options={"pipeline": 2, "shard": 2, "tensor": 2}),
    )
}


def chain(places: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(PLACES[a], PLACES[b], id=f"{a} to {b}") for a, b in places]


# Every layout is written once and read once by another kind, small and large world sizes either way.
MOVES = chain(
    [
        ("single", "pipeline2 x shard2 x tensor2"),
        ("pipeline2 x shard2 x tensor2", "zero3-2"),
        ("zero3-2", "tensor2 x shard2"),
        ("tensor2 x shard2", "ddp-2"),
        ("ddp-2", "pipeline-2"),
        ("pipeline-2", "zero2-4"),
        ("zero2-4", "tensor-2"),
        ("tensor-2", "pipeline2 x tensor2"),
        ("pipeline2 x tensor2", "zero1-2"),
        ("zero1-2", "single"),
    ]
)


@pytest.fixture(scope="module")
def uninterrupted(pool: Any) -> Record:
    """The whole run on one process."""
    (record,) = pool.run(fit, 1, PLACES["single"], STEPS, init_group=False)
    return record


class Saved:
    """Complete runs that save on their way, each made once."""

    def __init__(self, ranks: Any, folder: Path) -> None:
        self._ranks = ranks
        self._folder = folder
        self._made: dict[str, list[Record]] = {}

    def run(self, place: Place) -> tuple[list[Record], str]:
        """Return the record of each rank, and the checkpoint of step :data:`SAVED_AT`."""
        folder = self._folder / place.name
        if place.name not in self._made:
            self._made[place.name] = start(self._ranks, place, STEPS, str(folder))
        return self._made[place.name], str(folder / f"step={SAVED_AT}.ckpt")


@pytest.fixture(scope="module")
def saved(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(pool.run, tmp_path_factory.mktemp("saved"))


def start(ranks: Any, place: Place, *arguments: Any) -> list[Record]:
    return ranks(fit, place.ranks, place, *arguments, init_group=place.ranks > 1, timeout=120)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("written", "read"), MOVES)
def test_resumed_under_another_layout(ranks, saved, uninterrupted, written, read):
    _, checkpoint = saved.run(written)
    for record in start(ranks, read, STEPS, None, checkpoint, True):
        assert record.losses == pytest.approx(uninterrupted.losses[SAVED_AT:], rel=1e-5)
        for name, value in uninterrupted.parameters.items():
            # The bias of keys has a gradient of zero, and of what rounding leaves of it AdamW makes a whole step.
            if not name.endswith("c_attn.bias"):
                assert (record.parameters[name] - value).norm() <= 1e-4 * value.norm() + 1e-6, name


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", [p for p in PLACES.values() if p.ranks < 8], ids=lambda place: place.name)
def test_resumed_under_the_same_layout_to_the_bit(ranks, saved, place):
    whole, checkpoint = saved.run(place)
    again = start(ranks, place, STEPS, None, checkpoint, True)
    for expected, found in zip(whole, again, strict=True):
        assert found.losses == expected.losses[SAVED_AT:]
        for name, value in expected.parameters.items():
            assert torch.equal(found.parameters[name], value), name


@pytest.mark.thorough
def test_experts(ranks, tmp_path):
    alone = Place("single", 1, "single", network="mixtral")
    spread = Place("expert-2", 2, options={"expert": 2}, network="mixtral")
    split = Place("zero3-2", 2, "zero3", network="mixtral")
    steps = STEPS - 1  # later, even DDP differs by more: AdamW makes a whole step of a gradient that is rounding alone
    (whole,) = start(ranks, alone, steps)
    for written, read in ((alone, spread), (spread, alone), (spread, split)):
        folder = tmp_path / f"{written.name} to {read.name}"
        start(ranks, written, SAVED_AT, str(folder))
        for record in start(ranks, read, steps, None, str(folder / f"step={SAVED_AT}.ckpt"), True):
            assert record.losses == pytest.approx(whole.losses[SAVED_AT:], rel=1e-5)
