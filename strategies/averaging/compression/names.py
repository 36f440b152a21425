"""Compressors and codecs by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainwright.strategies.averaging.compression.codecs import Cast, Codec, Int8, Sign, TopK
from trainwright.strategies.averaging.compression.compressor import Gathered, GradientCompressor, TwoPhase
from trainwright.strategies.averaging.compression.options import (
    ONLY_OF_AVERAGES,
    CompressionChoice,
    choose_compression,
    compressor_names,
    option_defaults,
)
from trainwright.strategies.averaging.compression.power import PowerSGD

__all__ = ["CompressionChoice", "choose_compression", "codec_of", "compressor_names", "make_compressor"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def make_compressor(name: str, **options: Any) -> GradientCompressor:
    """What averages buckets over ranks, by name.

    =========  =========================================  ======================================================
    name       options                                    what is sent of a bucket
    =========  =========================================  ======================================================
    fp16       -                                          half-precision numbers
    bf16       -                                          the same, with the range of float32 and 8 bits of it
    int8       ``block=256``                              a byte a number and a scale per block
    topk       ``ratio=0.01``, ``values="fp32"``          the largest numbers and their places, with feedback
    powersgd   ``rank=4``, ``iterations=2``,              two thin factors of each matrix, with feedback
               ``least_gain=2``, ``values="bf16"``
    onebit     ``block=2048``                             a sign a number and a scale per block, with feedback
    =========  =========================================  ======================================================

    ``values`` writes what is picked (or the factors) as ``fp32``, ``fp16``, ``bf16`` or, not for factors, ``int8``.
    ``warmup_steps=100`` of the last three is for whoever averages gradients of optimizer steps: the first so many are
    averaged as they are (arXiv:1712.01887, section 3.3; arXiv:2102.02888). ``sends`` of ``topk`` and ``powersgd`` is
    for them, too: ``gradients``, or ``steps`` of Adam, which ``auto`` takes where there are any
    (:mod:`~trainwright.strategies.averaging.compression.adam`). The compressor itself knows neither.

    Args:
        name: one of :func:`compressor_names`.
        **options: of the one that is named.

    Raises:
        ValueError: if there is no such compressor or option, or a value is out of its range.
    """
    given = _all_options(name, options)
    for option in ONLY_OF_AVERAGES:
        given.pop(option, None)
    return _COMPRESSORS[name](given)


def codec_of(name: str, **options: Any) -> Codec:
    """How one message is written alone, for what is sent from one rank to another, by name.

    Args:
        name: one of :func:`compressor_names` that is a codec.
        **options: as of :func:`make_compressor`.

    Raises:
        ValueError: as :func:`make_compressor`, and if what is named only averages over a group.
    """
    given = _all_options(name, options)
    if name not in _CODECS:
        raise ValueError(
            f"compression={name} only averages over a group of ranks; messages from one rank to another can be written "
            f"as {', '.join(_CODECS)}."
        )
    return _CODECS[name](given)


def _all_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of the compressor ``name``, checked."""
    choice = choose_compression({**options, "name": name})
    if choice is None:
        raise ValueError(f"compression={name} is no compressor; name one of {', '.join(compressor_names())}.")
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
_COMPRESSORS: dict[str, Callable[[dict[str, Any]], GradientCompressor]] = {
    "fp16": lambda given: TwoPhase(_CODECS["fp16"](given)),
    "bf16": lambda given: TwoPhase(_CODECS["bf16"](given)),
    "int8": lambda given: TwoPhase(_CODECS["int8"](given)),
    "topk": lambda given: Gathered(_CODECS["topk"](given)),
    "powersgd": lambda given: PowerSGD(
        given["rank"],
        given["least_gain"],
        given["iterations"],
        None if given["values"] == "fp32" else TwoPhase(_values(given["values"])),
    ),
    "onebit": lambda given: TwoPhase(_CODECS["onebit"](given), feedback=True),
}
