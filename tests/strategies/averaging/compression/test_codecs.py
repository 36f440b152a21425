"""Codecs: message sizes, error bounds, non-finite values and error feedback."""

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
def test_message_sizes_and_independent_rows(name: str, length: int) -> None:
    codec, given = CODECS[name], rows(3, length)
    data = codec.encode(given)
    assert data.dtype == torch.uint8
    assert data.shape == (3, codec.row_bytes(length))
    decoded = codec.decode(data, length)
    assert decoded.shape == (3, length)
    for row, expected in zip(given, decoded, strict=True):
        assert torch.equal(codec.decode(codec.encode(row[None]), length)[0], expected)
    assert codec.decode(codec.encode(torch.zeros(2, length)), length).eq(0).all()


@pytest.mark.parametrize("name", CODECS)
def test_non_finite_values_stay_visible_but_not_in_the_residual(name: str) -> None:
    codec = CODECS[name]
    for bad in (float("nan"), float("inf"), -float("inf")):
        given, residuals = rows(1, 100), torch.zeros(1, 100)
        given[0, 40] = bad
        assert not codec.decode(codec.encode(given), 100).isfinite().all()
        encode_with_feedback(codec, given, residuals)
        assert residuals.isfinite().all()


def test_int8_errors_are_at_most_half_a_step() -> None:
    given = rows(4, 1000)
    found = Int8(64).decode(Int8(64).encode(given), 1000)
    steps = torch.nn.functional.pad(given, (0, 24)).unflatten(1, (-1, 64)).abs().amax(-1) / 127
    error = torch.nn.functional.pad(found - given, (0, 24)).unflatten(1, (-1, 64)).abs().amax(-1)
    assert (error <= steps * 0.5001).all()


@pytest.mark.parametrize(("codec", "given", "expected"), [
    (
        Sign(8),
        [1.0, -3.0, 2.0, -2.0, 4.0, 0.0, -1.0, 3.0, -6.0, 2.0],
        [2.0, -2.0, 2.0, -2.0, 2.0, 2.0, -2.0, 2.0, -4.0, 4.0],
    ),
    (
        TopK(0.3),
        [0.1, -5.0, 0.2, 3.0, -0.3, 0.0, 0.4, 0.5, -0.6, 4.0],
        [0.0, -5.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0],
    ),
    (TopK(1.0), [0.1, -5.0, 0.25], [0.1, -5.0, 0.25]),
    (Cast(torch.float16), [1e6, -1e6, 1.0], [65504.0, -65504.0, 1.0]),
])  # fmt: skip
def test_decoded_values(codec: Codec, given: list[float], expected: list[float]) -> None:
    found = codec.decode(codec.encode(torch.tensor([given])), len(given))
    assert torch.equal(found, torch.tensor([expected]))


@pytest.mark.parametrize("name", CODECS)
def test_message_plus_residual_equals_input(name: str) -> None:
    codec, given, before = CODECS[name], rows(2, 100), rows(2, 100, seed=1)
    residuals = before.clone()
    sent = codec.decode(encode_with_feedback(codec, given, residuals), 100)
    torch.testing.assert_close(sent + residuals, given + before, rtol=1e-6, atol=1e-6)
