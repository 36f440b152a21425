"""Compression residuals in snapshots: bit-exact rollback, and fewer replicas."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.trainer.memory_harness import PLACES, Hold, Model, fit, meet_anew
from tests.trainer.test_memory_resume import HELD_AT, STEPS, check_equal, go_on

TOPK = {"name": "topk", "ratio": 0.1, "warmup_steps": 0}
ONEBIT = {"name": "onebit", "warmup_steps": 1, "block": 64}
COMPRESSED: dict[str, tuple[str, dict[str, Any], int]] = {
    "ddp, onebit": ("ddp", {"compression": ONEBIT}, 2),
    "zero3, topk": ("zero3", {"compression": TOPK, "replicate": 2, "shard": 1}, 2),
}


def resume_compressed(place: str) -> dict[str, Any]:
    PLACES[place] = COMPRESSED[place]
    return go_on(place, 0.3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", COMPRESSED)
def test_resume_is_bit_exact(ranks: Any, place: str) -> None:
    for result in ranks(resume_compressed, COMPRESSED[place][2], place):
        check_equal(result)


def lose_one(folder: str, members: list[int]) -> dict[str, torch.Tensor]:
    PLACES["compressed"] = ("ddp", {"compression": {**TOPK, "ratio": 0.2}}, 3)
    rank, hold = dist.get_rank(), Hold(HELD_AT)
    fit("compressed", [hold], Model(dropout=0.0), max_steps=HELD_AT + 1)
    if not meet_anew(folder, members, rank):
        return {}
    recorder, _ = fit("compressed", module=Model(dropout=0.0), held=hold.snapshots.newest(), max_steps=STEPS)
    return recorder.parameters


def test_fewer_replicas_stay_equal(ranks: Any, tmp_path: Any) -> None:
    lost, first, second = ranks(lose_one, 3, str(tmp_path), [1, 2])
    assert lost == {}
    assert all(torch.equal(value, second[parameter]) for parameter, value in first.items())
    assert first.keys() == second.keys() != set()
