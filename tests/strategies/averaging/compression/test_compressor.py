"""Compressed averages over ranks: bit-identical, near the mean, with the predicted bytes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.averaging.compression.codecs import Cast, Int8, Sign, TopK
from trainwright.strategies.averaging.compression.compressor import Gathered, GradientCompressor, TwoPhase, num_elements
from trainwright.strategies.averaging.compression.powersgd import PowerSGD

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
# A bucket with matrices, a tensor of three dims, a vector and a scalar.
SHAPES = [(20, 30), (7,), (4, 5, 12), (), (3, 4)]
NUMEL = 20 * 30 + 7 + 4 * 5 * 12 + 1 + 12
# Largest error of one average; None: near the mean only with feedback.
ERRORS = {"fp32": 1e-6, "bf16": 1e-2, "int8": 2e-2, "sign": None, "topk": None, "all": 1e-6}
ERRORS |= {"powersgd": None, "powersgd, whole": 1e-6}


def gradient(rank: int, step: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))


def averages(name: str, steps: int, shapes: Any = SHAPES) -> list[Tensor]:
    compressor, numel = COMPRESSORS[name], num_elements(shapes)
    state, found = compressor.new_state(shapes, dist.get_world_size(), torch.device("cpu")), []
    for step in range(steps):
        found.append(gradient(dist.get_rank(), step, numel))
        compressor.average(found[-1], shapes, None, state)
    return found


def single_numbers() -> list[Tensor]:
    return [averages(name, 1, [(1,)])[0] for name in COMPRESSORS]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_averages_are_bit_identical_and_near_the_mean(ranks: Any, name: str, count: int) -> None:
    results = ranks(averages, count, name, 2)
    for step in range(2):
        mean = torch.stack([gradient(rank, step, NUMEL) for rank in range(count)]).mean(0)
        for result in results:
            assert torch.equal(result[step], results[0][step])
        if ERRORS[name] is not None:
            assert (results[0][step] - mean).abs().max() <= ERRORS[name] * 4


def test_one_number(ranks: Any) -> None:
    first, second = ranks(single_numbers, 2)
    assert all(map(torch.equal, first, second))


def test_bytes() -> None:
    assert TwoPhase(Cast(torch.float32)).sent_bytes([(10, 90), (100,)], 4) == 2 * 3 * 250 * 4  # as a ring all-reduce
    assert TwoPhase(Int8(256)).sent_bytes([(4096,)], 4) == 2 * 3 * (1024 + 4 * 4)
    assert Gathered(TopK(0.01)).sent_bytes([(10_000,)], 4) == 3 * 100 * 8
    # The first matrix as 2 x 20 and 2 x 30 numbers; the second, hardly shortened, uncompressed.
    assert PowerSGD(2).sent_bytes(SHAPES, 4) == 2 * 3 * 4 * (40 // 4 + (60 + 7 + 240 + 1 + 12) // 4)


def low_rank() -> float:
    """Error of PowerSGD on gradients whose mean has its rank, after some steps with equal gradients."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    left, right = torch.randn(20, 1, generator=generator), torch.randn(30, 1, generator=generator)
    mean = left @ right.T
    dist.all_reduce(mean)
    compressor, state = PowerSGD(2), None
    for _ in range(8):
        flat = (left @ right.T).view(-1).clone()
        state = state or compressor.new_state([(20, 30)], 2, torch.device("cpu"))
        state["residual"].zero_()  # without feedback
        compressor.average(flat, [(20, 30)], None, state)
    return float((flat.view(20, 30) - mean / 2).norm() / mean.norm())


def test_powersgd_is_exact_for_gradients_of_its_rank(ranks: Any) -> None:
    assert max(ranks(low_rank, 2)) < 1e-5
