"""Compressors by name, and errors of names and options."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

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


ENCODED = [
    ("topk", {"ratio": 0.1, "values": "bf16"}),
    ("topk", {"ratio": 0.1, "values": "int8"}),
    ("powersgd", {"rank": 2, "values": "bf16"}),
    ("powersgd", {"rank": 2, "values": "fp16"}),
]


def averaged(steps: int) -> list[dict[str, torch.Tensor]]:
    results = []
    for name, options in ENCODED:
        compressor = make_compressor(CompressionChoice(name, options))
        state = compressor.new_state(SHAPES, dist.get_world_size(), torch.device("cpu"))
        given, total = torch.zeros(2007), torch.zeros(2007)
        for step in range(steps):
            flat = torch.randn(2007, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            given += flat
            compressor.average(flat, SHAPES, None, state)
            total += flat
        results.append({"given": given, "total": total, "kept": state["residual"]})
    return results


def test_encoded_values_send_less_and_residuals_keep_the_rest(ranks: Any) -> None:
    found = ranks(averaged, 2, 6)
    for index, (name, options) in enumerate(ENCODED):
        first, second = (rank[index] for rank in found)
        assert torch.equal(first["total"], second["total"])
        lost = (first["given"] + second["given"] - first["kept"] - second["kept"]) / 2 - first["total"]
        assert lost.abs().sum() / first["given"].abs().sum() < 1e-5
        choices = [CompressionChoice(name, {**options, **values}) for values in ({}, {"values": "fp32"})]
        sent = [make_compressor(choice).sent_bytes(SHAPES, 2) for choice in choices]
        assert sent[0] < sent[1]
