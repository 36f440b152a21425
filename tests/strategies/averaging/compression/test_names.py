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
    ("topp", "Unknown compression 'topp'. Did you mean 'topk'? Available: none, fp16, bf16, int8"),
    ("randomk", "compression=randomk was removed; type compression=topk"),
    ({"name": "randomk", "ratio": 0.1}, "compression=randomk was removed; type compression=topk"),
    (3, "compression=3: must be a name, a mapping"),
    ({"ratio": 0.1}, "has no name"),
    (
        {"name": "topk", "ration": 0.1},
        "has no option 'ration'. Did you mean 'ratio'? It takes ratio, values",
    ),
    ({"name": "bf16", "block": 3}, "compression=bf16 has no option 'block'. It takes none."),
    ({"name": "topk", "ratio": 0}, "compression.ratio=0 for topk: must be above 0 and at most 1"),
    ({"name": "topk", "ratio": "much"}, "compression.ratio=much for topk"),
    ({"name": "topk", "values": "fp8"}, "must be one of fp32, fp16, bf16, int8"),
    ({"name": "powersgd", "values": "int8"}, "must be one of fp32, fp16, bf16"),
    ({"name": "powersgd", "rank": 0}, "compression.rank=0 for powersgd: must be a whole number of at least 1"),
    ({"name": "onebit", "block": 12}, "must be a positive multiple of 8"),
    ({"name": "onebit", "warmup_steps": 0}, "must be a whole number of at least 1 (optimizer steps)"),
    ({"name": "topk", "warmup_steps": -1}, "must be a whole number of optimizer steps, 0 (off) or more"),
    ({"name": "none", "ratio": 1}, "compression=none has no options"),
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
