"""Run states written by one layout and resumed under another continue with the losses of an uninterrupted run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.parity.harness import Record
from tests.parity.layouts import LayoutCase, run

SAVED_AT, STEPS = 3, 5  # four steps an epoch
CASE = LayoutCase(
    "gpt2-small", optimizer="adamw", steps=STEPS, samples=32, length=16, shuffle=True, trainer={"data_seed": 3}
)
# Ranks and a case.
Place = tuple[int, LayoutCase]


def place(ranks: int, strategy: str = "hybrid", **options: Any) -> Place:
    folder = {} if strategy in ("single", "ddp") else {"one_file": False}  # for one file see state/test_one_file.py
    return ranks, replace(CASE, strategy=strategy, options={**options, **folder})


PLACES: dict[str, Place] = {
    "single": place(1, "single"),
    "ddp-2": place(2, "ddp"),
    "zero1-2": place(2, "zero1"),
    "zero2-4": place(4, "zero2"),
    "zero3-2": place(2, "zero3"),
    "tensor-2": place(2, tensor=2, shard=1),
    "pipeline-2": place(2, pipeline=2, shard=1),
    "pipeline2 x tensor2": place(4, pipeline=2, tensor=2, shard=1),
    "tensor2 x shard2": place(4, tensor=2, shard=2),
    "pipeline2 x shard2 x tensor2": place(8, pipeline=2, shard=2, tensor=2),
}


# Every layout is written once and read once by another kind, small and large world sizes either way.
RING = (
    "single", "pipeline2 x shard2 x tensor2", "zero3-2", "tensor2 x shard2", "ddp-2", "pipeline-2", "zero2-4",
    "tensor-2", "pipeline2 x tensor2", "zero1-2", "single",
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return ``saved(name)``: the records of a whole run that saves on its way, made once, and its checkpoint."""
    folder = tmp_path_factory.mktemp("saved")

    @cache
    def run_whole(name: str) -> tuple[list[Record], str]:
        records = start(pool.run, PLACES[name], save=(str(folder / name), SAVED_AT))
        return records, str(folder / name / f"step={SAVED_AT}.ckpt")

    return run_whole


def start(ranks: Any, place: Place, **options: Any) -> list[Record]:
    number, case = place
    return ranks(run, number, case, **options, init_group=number > 1, timeout=120)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("written", "read"), pairwise(RING))
def test_resumed_under_another_layout(ranks, saved, written, read):
    (uninterrupted,), _ = saved("single")
    for record in start(ranks, PLACES[read], resume=saved(written)[1], spoil=True):
        assert record.losses == pytest.approx(uninterrupted.losses[SAVED_AT:], rel=1e-5)
        for name, value in uninterrupted.parameters.items():
            # The bias of keys has a gradient of zero, and of what rounding leaves of it AdamW makes a whole step.
            if not name.endswith("c_attn.bias"):
                assert (record.parameters[name] - value).norm() <= 1e-4 * value.norm() + 1e-6, name


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name, (number, _) in PLACES.items() if number < 8])
def test_resumed_under_the_same_layout_to_the_bit(ranks, saved, name):
    whole, checkpoint = saved(name)
    again = start(ranks, PLACES[name], resume=checkpoint, spoil=True)
    for expected, found in zip(whole, again, strict=True):
        assert found.losses == expected.losses[SAVED_AT:]
        for key, value in expected.parameters.items():
            assert torch.equal(found.parameters[key], value), key


@pytest.mark.thorough
def test_experts(ranks, tmp_path):
    # Later, even DDP differs by more: AdamW makes a whole step of a gradient that is rounding alone.
    case = replace(CASE, network="mixtral", steps=STEPS - 1)
    alone, spread = (1, replace(case, strategy="single")), (2, replace(case, options={"expert": 2}))
    (whole,) = start(ranks, alone)
    moves = ((alone, spread), (spread, alone), (spread, (2, replace(case, strategy="zero3"))))
    for index, (written, read) in enumerate(moves):
        folder = tmp_path / str(index)
        start(ranks, (written[0], replace(written[1], steps=SAVED_AT)), save=(str(folder), SAVED_AT))
        for record in start(ranks, read, resume=str(folder / f"step={SAVED_AT}.ckpt"), spoil=True):
            assert record.losses == pytest.approx(whole.losses[SAVED_AT:], rel=1e-5)
