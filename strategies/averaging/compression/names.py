"""Compressors and codecs by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainwright.strategies.averaging.compression.codecs import Cast, Codec, Int8, Sign, TopK
from trainwright.strategies.averaging.compression.compressor import Gathered, GradientCompressor, TwoPhase
from trainwright.strategies.averaging.compression.options import CompressionChoice
from trainwright.strategies.averaging.compression.powersgd import PowerSGD

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def make_compressor(choice: CompressionChoice) -> GradientCompressor:
    """Create the chosen compressor.

    =========  =========================================  ======================================================
    name       options                                    sent per bucket
    =========  =========================================  ======================================================
    fp16       -                                          half-precision numbers
    bf16       -                                          bfloat16 numbers
    int8       ``block=256``                              a byte per number and a scale per block
    topk       ``ratio=0.01``, ``values="fp32"``          the largest numbers and their indices, with feedback
    powersgd   ``rank=4``, ``iterations=2``,              two low-rank factors of each matrix, with feedback
               ``least_gain=2``, ``values="bf16"``
    onebit     ``block=2048``                             a sign per number and a scale per block, with feedback
    =========  =========================================  ======================================================

    ``values`` is the encoding of the kept numbers or factors: ``fp32``, ``fp16``, ``bf16`` or, except for factors,
    ``int8``. ``warmup_steps=100`` of the last three and ``sends`` of ``topk`` and ``powersgd`` are options of gradient
    averages, see :mod:`~trainwright.strategies.averaging.compression.adam`; the compressor ignores them.

    Args:
        choice: validated.
    """
    if choice.name == "powersgd":
        given = choice.all_options
        inner = None if given["values"] == "fp32" else TwoPhase(_values(given["values"]))
        return PowerSGD(given["rank"], given["least_gain"], given["iterations"], inner)
    codec = codec_of(choice)
    return Gathered(codec) if choice.name == "topk" else TwoPhase(codec, feedback=choice.name == "onebit")


def codec_of(choice: CompressionChoice) -> Codec:
    """Create the codec of point-to-point messages; not for ``powersgd``, which works only within a group."""
    return _CODECS[choice.name](choice.all_options)


def _values(how: str) -> Codec:
    return Int8(256) if how == "int8" else Cast(_DTYPES[how])


_CODECS: dict[str, Callable[[dict[str, Any]], Codec]] = {
    "fp16": lambda _: Cast(torch.float16),
    "bf16": lambda _: Cast(torch.bfloat16),
    "int8": lambda given: Int8(given["block"]),
    "topk": lambda given: TopK(given["ratio"], _values(given["values"])),
    "onebit": lambda given: Sign(given["block"]),
}
