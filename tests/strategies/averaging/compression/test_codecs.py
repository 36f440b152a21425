"""Codecs: what is lost, and how many bytes are written."""

import pytest
import torch
from torch import Tensor

from trainwright.strategies.averaging.compression.codecs import Cast, Codec, Int8, Sign, TopK
from trainwright.strategies.averaging.compression.compressor import encode_with_feedback

CODECS = {
    "fp32": Cast(torch.float32),
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
    "int8": Int8(64),
    "sign": Sign(64),
    "topk": TopK(0.1),
    "topk of bf16": TopK(0.1, Cast(torch.bfloat16)),
}


def rows(count: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, length, generator=generator) * torch.logspace(-3, 2, count)[:, None]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("length", [1, 7, 8, 63, 64, 65, 1000])
def test_bytes_are_those_of_the_formula(name: str, length: int) -> None:
    codec = CODECS[name]
    data = codec.encode(rows(3, length))
    assert data.dtype == torch.uint8
    assert data.shape == (3, codec.row_bytes(length))
    assert codec.decode(data, length).shape == (3, length)


@pytest.mark.parametrize("name", CODECS)
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    codec, given = CODECS[name], rows(3, 100)
    whole = codec.decode(codec.encode(given), 100)
    for index in range(3):
        assert torch.equal(codec.decode(codec.encode(given[index, None]), 100)[0], whole[index])


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros(name: str) -> None:
    codec = CODECS[name]
    assert codec.decode(codec.encode(torch.zeros(2, 100)), 100).eq(0).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(name: str, bad: float) -> None:
    codec, given = CODECS[name], rows(1, 100)
    given[0, 40] = bad
    assert not codec.decode(codec.encode(given), 100).isfinite().all()


def test_errors_of_int8_are_at_most_half_a_step() -> None:
    given = rows(4, 1000)
    found = Int8(64).decode(Int8(64).encode(given), 1000)
    steps = torch.nn.functional.pad(given, (0, 24)).unflatten(1, (-1, 64)).abs().amax(-1) / 127
    error = torch.nn.functional.pad(found - given, (0, 24)).unflatten(1, (-1, 64)).abs().amax(-1)
    assert (error <= steps * 0.5001).all()


def test_signs_and_the_mean_magnitude_of_a_block() -> None:
    given = torch.tensor([[1.0, -3.0, 2.0, -2.0, 4.0, 0.0, -1.0, 3.0, -6.0, 2.0]])
    found = Sign(8).decode(Sign(8).encode(given), 10)
    assert found.tolist() == [[2.0, -2.0, 2.0, -2.0, 2.0, 2.0, -2.0, 2.0, -4.0, 4.0]]


def test_the_largest_are_kept() -> None:
    given = torch.tensor([[0.1, -5.0, 0.2, 3.0, -0.3, 0.0, 0.4, 0.5, -0.6, 4.0]])
    found = TopK(0.3).decode(TopK(0.3).encode(given), 10)
    assert found.tolist() == [[0.0, -5.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0]]


def test_all_are_kept_at_ratio_1() -> None:
    given = rows(2, 99)
    assert torch.equal(TopK(1.0).decode(TopK(1.0).encode(given), 99), given)


def test_fp16_has_a_largest_number() -> None:
    given = torch.tensor([[1e6, -1e6, 1.0]])
    assert Cast(torch.float16).decode(Cast(torch.float16).encode(given), 3).tolist() == [[65504.0, -65504.0, 1.0]]


@pytest.mark.parametrize("name", CODECS)
def test_what_was_sent_and_what_is_kept_back_is_what_was_given(name: str) -> None:
    codec, given, before = CODECS[name], rows(2, 100), rows(2, 100, seed=1)
    residuals = before.clone()
    sent = codec.decode(encode_with_feedback(codec, given, residuals), 100)
    torch.testing.assert_close(sent + residuals, given + before, rtol=1e-6, atol=1e-6)


def test_a_gradient_that_is_not_finite_does_not_stay() -> None:
    residuals = torch.zeros(1, 10)
    given = torch.ones(1, 10)
    given[0, 3] = float("nan")
    encode_with_feedback(Int8(8), given, residuals)
    assert residuals.isfinite().all()


@pytest.mark.parametrize(("make", "problem"), [
    (lambda: Int8(0), "block=0"),
    (lambda: Sign(12), "multiple of 8"),
    (lambda: TopK(0.0), "ratio=0.0"),
    (lambda: TopK(1.5), "ratio=1.5"),
])  # fmt: skip
def test_impossible_options(make: type[Codec], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()  # type: ignore[abstract]
