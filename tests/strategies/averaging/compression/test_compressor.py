"""Averages over ranks that send less: equal bits everywhere, near the mean, of the bytes that the formula says."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.averaging.compression.codecs import Cast, Int8, Sign, TopK
from trainwright.strategies.averaging.compression.compressor import Gathered, GradientCompressor, TwoPhase, num_elements
from trainwright.strategies.averaging.compression.power import PowerSGD

COMPRESSORS: dict[str, GradientCompressor] = {
    "fp32": TwoPhase(Cast(torch.float32)),
    "bf16": TwoPhase(Cast(torch.bfloat16)),
    "int8": TwoPhase(Int8(64)),
    "sign": TwoPhase(Sign(64), feedback=True),
    "topk": Gathered(TopK(0.1)),
    "all": Gathered(TopK(1.0)),
    "powersgd": PowerSGD(2),
    "powersgd, whole": PowerSGD(2, least_gain=1000),
}
# A bucket: two matrices, one of more dims, a vector and a number.
SHAPES = [(20, 30), (7,), (4, 5, 12), (), (3, 4)]
NUMEL = 20 * 30 + 7 + 4 * 5 * 12 + 1 + 12
# Largest error of one average, by the largest magnitude of the gradients; None: only with feedback is it near the mean.
ERRORS = {"fp32": 1e-6, "bf16": 1e-2, "int8": 2e-2, "sign": None, "topk": None, "all": 1e-6}
ERRORS |= {"powersgd": None, "powersgd, whole": 1e-6}


def gradient(rank: int, step: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))


def averages(name: str, steps: int, shapes: Any = SHAPES) -> dict[str, Any]:
    compressor, ranks, numel = COMPRESSORS[name], dist.get_world_size(), num_elements(shapes)
    state = compressor.new_state(shapes, ranks, torch.device("cpu"))
    found, total = [], torch.zeros(numel)
    for step in range(steps):
        flat = gradient(dist.get_rank(), step, numel)
        compressor.average(flat, shapes, None, state)
        found.append(flat)
        total += flat
    return {"found": found, "total": total, "state": state}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_ranks_have_equal_bits_near_the_mean(ranks: Any, name: str, count: int) -> None:
    results = ranks(averages, count, name, 2)
    for step in range(2):
        mean = torch.stack([gradient(rank, step, NUMEL) for rank in range(count)]).mean(0)
        for result in results:
            assert torch.equal(result["found"][step], results[0]["found"][step])
        error = (results[0]["found"][step] - mean).abs().max()
        if ERRORS[name] is not None:
            assert error <= ERRORS[name] * 4


@pytest.mark.parametrize("name", ["sign", "topk", "powersgd"])
def test_nothing_is_lost_for_good(ranks: Any, name: str) -> None:
    """What was averaged, and what the ranks keep back, is the mean of all that was given."""
    count, steps = 3, 8
    results = ranks(averages, count, name, steps)
    given = torch.stack([gradient(rank, step, NUMEL) for rank in range(count) for step in range(steps)]).sum(0) / count
    kept = torch.stack([result["state"]["residual"] for result in results]).mean(0)
    if "chunk_residual" in results[0]["state"]:
        kept = kept + torch.cat([result["state"]["chunk_residual"] for result in results])[:NUMEL]
    torch.testing.assert_close(results[0]["total"] + kept, given, rtol=1e-4, atol=1e-4)


def test_one_number(ranks: Any) -> None:
    for name in COMPRESSORS:
        first, second = ranks(averages, 2, name, 1, [(1,)])
        assert torch.equal(first["found"][0], second["found"][0])


def test_bytes() -> None:
    assert TwoPhase(Cast(torch.float32)).sent_bytes([(10, 90), (100,)], 4) == 2 * 3 * 250 * 4  # as a ring all-reduce
    assert TwoPhase(Int8(256)).sent_bytes([(4096,)], 4) == 2 * 3 * (1024 + 4 * 4)
    assert Gathered(TopK(0.01)).sent_bytes([(10_000,)], 4) == 3 * 100 * 8
    # Of the first matrix 2 x 20 and 2 x 30 numbers; the second would hardly be shorter and goes with the others.
    assert PowerSGD(2).sent_bytes(SHAPES, 4) == 2 * 3 * 4 * (40 // 4 + (60 + 7 + 240 + 1 + 12) // 4)


def low_rank() -> float:
    """How far PowerSGD is from the mean of gradients whose sum has its rank, after some steps of the same ones."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    left, right = torch.randn(20, 1, generator=generator), torch.randn(30, 1, generator=generator)
    mean = left @ right.T
    dist.all_reduce(mean)
    compressor, state = PowerSGD(2), None
    for _ in range(8):
        flat = (left @ right.T).view(-1).clone()
        state = state or compressor.new_state([(20, 30)], 2, torch.device("cpu"))
        state["residual"].zero_()  # feedback would bring what is lacking by and by as well
        compressor.average(flat, [(20, 30)], None, state)
    return float((flat.view(20, 30) - mean / 2).norm() / mean.norm())


def test_powersgd_finds_what_has_its_rank(ranks: Any) -> None:
    assert max(ranks(low_rank, 2)) < 1e-5
