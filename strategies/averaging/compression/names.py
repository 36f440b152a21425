"""Compressors and codecs by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainwright.strategies.averaging.compression.codecs import Cast, Codec, Int8, Sign, TopK
from trainwright.strategies.averaging.compression.compressor import Gathered, GradientCompressor, TwoPhase
from trainwright.strategies.averaging.compression.options import (
    CompressionChoice,
    choose_compression,
    compressor_names,
    option_defaults,
)
from trainwright.strategies.averaging.compression.powersgd import PowerSGD

__all__ = ["CompressionChoice", "choose_compression", "codec_of", "compressor_names", "make_compressor"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def make_compressor(name: str, **options: Any) -> GradientCompressor:
    """Create a compressor by name.

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
        name: one of :func:`compressor_names`.
        **options: of that compressor.

    Raises:
        ValueError: if there is no such compressor or option, or a value is out of range.
    """
    return _compressor(name, _all_options(name, options))


def codec_of(name: str, **options: Any) -> Codec:
    """Create the codec of point-to-point messages by name.

    Args:
        name: a :func:`compressor_names` entry that is a codec.
        **options: as in :func:`make_compressor`.

    Raises:
        ValueError: as :func:`make_compressor`, and if the compressor works only within a group.
    """
    given = _all_options(name, options)
    if name not in _CODECS:
        raise ValueError(
            f"compression={name} only averages over a group of ranks; point-to-point messages can be encoded as "
            f"{', '.join(_CODECS)}."
        )
    return _CODECS[name](given)


def _all_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a compressor, validated and completed by defaults."""
    choice = choose_compression({**options, "name": name})
    if choice is None:
        raise ValueError(f"compression={name} is no compressor. Available: {', '.join(compressor_names())}.")
    return {**option_defaults(name), **choice.options}


def _values(how: str) -> Codec:
    return Int8() if how == "int8" else Cast(_DTYPES[how])


_CODECS: dict[str, Callable[[dict[str, Any]], Codec]] = {
    "fp16": lambda _: Cast(torch.float16),
    "bf16": lambda _: Cast(torch.bfloat16),
    "int8": lambda given: Int8(given["block"]),
    "topk": lambda given: TopK(given["ratio"], _values(given["values"])),
    "onebit": lambda given: Sign(given["block"]),
}


def _compressor(name: str, given: dict[str, Any]) -> GradientCompressor:
    if name == "powersgd":
        inner = None if given["values"] == "fp32" else TwoPhase(_values(given["values"]))
        return PowerSGD(given["rank"], given["least_gain"], given["iterations"], inner)
    codec = _CODECS[name](given)
    return Gathered(codec) if name == "topk" else TwoPhase(codec, feedback=name == "onebit")
