"""Compressors by name, and errors of names and options."""

from typing import Any

import pytest
import torch

from trainwright.strategies.averaging.compression.names import codec_of, make_compressor
from trainwright.strategies.averaging.compression.options import (
    CompressionChoice,
    choose_compression,
    compression_problems,
    compressor_names,
)

SHAPES = [(40, 50), (7,)]


@pytest.mark.parametrize(("compression", "said"), [
    ("topp", "compression=topp: unknown; did you mean topk? compressors: bf16, fp16, int8, none"),
    ("randomk", "compression=randomk was removed; type compression=topk"),
    ({"name": "randomk", "ratio": 0.1}, "compression=randomk was removed; type compression=topk"),
    (3, "compression=3: must be a name, a mapping"),
    ({"ratio": 0.1}, "has no name"),
    ({"name": "topk", "ration": 0.1}, "compression.ration: there is no such option; did you mean ratio? options: "),
    ({"name": "bf16", "block": 3}, "compression=bf16 with compression.block: there is no such option; options: name"),
    ({"name": "topk", "ratio": 0}, "compression.ratio=0: must be a finite number above 0 and at most 1"),
    ({"name": "topk", "ratio": "much"}, "compression.ratio=much: must be a finite number"),
    ({"name": "topk", "values": "fp8"}, "compression.values=fp8: unknown; allowed: fp32, fp16, bf16, int8"),
    ({"name": "powersgd", "values": "int8"}, "unknown; allowed: fp32, fp16, bf16"),
    ({"name": "powersgd", "rank": 0}, "compression.rank=0: must be a whole number of at least 1"),
    ({"name": "onebit", "block": 12}, "must be a positive multiple of 8"),
    ({"name": "onebit", "warmup_steps": 0}, "must be a whole number of at least 1 (optimizer steps)"),
    ({"name": "topk", "warmup_steps": -1}, "must be a whole number of at least 0 (optimizer steps, 0 is off)"),
    ({"name": "none", "ratio": 1}, "compression=none with compression.ratio: there is no such option"),
])  # fmt: skip
def test_errors(compression: Any, said: str) -> None:
    assert said in "; ".join(compression_problems(compression))
    with pytest.raises(ValueError, match="compression"):
        choose_compression(compression)


def test_off() -> None:
    assert choose_compression(None) is choose_compression("none") is choose_compression({"name": "none"}) is None


def test_codecs() -> None:
    names = compressor_names()
    assert names == ("fp16", "bf16", "int8", "topk", "powersgd", "onebit")
    for name in names:
        choice = CompressionChoice(name)
        assert make_compressor(choice).sent_bytes(SHAPES, 2) > 0
        if name != "powersgd":
            codec = codec_of(choice)
            assert codec.encode(torch.ones(1, 64)).shape == (1, codec.row_bytes(64))


@pytest.mark.parametrize(("name", "values"), [("topk", "bf16"), ("topk", "int8"), ("powersgd", "bf16")])
def test_encoded_values_send_less(name: str, values: str) -> None:
    encoded, exact = (CompressionChoice(name, {"values": each}) for each in (values, "fp32"))
    assert make_compressor(encoded).sent_bytes(SHAPES, 2) < make_compressor(exact).sent_bytes(SHAPES, 2)
