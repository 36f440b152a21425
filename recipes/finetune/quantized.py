"""Frozen weights in four bits: NF4 of QLoRA (Dettmers et al., 2023, arXiv:2305.14314) in plain tensors.

A weight is cut into blocks of 64 values in memory order. A block is a row of 36 bytes: two values per byte, the first
in the high half, then the largest absolute value as float32. ZeRO-3 and checkpoints cut between rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64
"""Values per scale."""
ROW = BLOCK // 2 + 4
"""Bytes per block: 4.5 bits per value."""
# Appendix E of the paper: quantiles of the normal distribution, scaled to [-1, 1], one of them 0.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_BLOCKS_AT_ONCE = 2**14  # bounds temporary memory


def packed_shape(shape: Iterable[int]) -> tuple[int, int]:
    """Return the shape of a packed weight: blocks (the last one zero-padded) and :data:`ROW`."""
    return -(-math.prod(shape) // BLOCK), ROW


def quantize(weight: Tensor) -> Tensor:
    """Return the nearest NF4 values of a floating-point tensor, as uint8 ``packed_shape(weight.shape)``."""
    found = torch.empty(packed_shape(weight.shape), dtype=torch.uint8, device=weight.device)
    if weight.is_meta:
        return found
    levels = torch.tensor(LEVELS, device=weight.device)
    flat = weight.detach().flatten()
    for rows, part in zip(found.split(_BLOCKS_AT_ONCE), flat.split(_BLOCKS_AT_ONCE * BLOCK), strict=True):
        values = F.pad(part.float(), (0, rows.shape[0] * BLOCK - part.numel())).view(-1, BLOCK)
        scales = values.abs().amax(dim=1, keepdim=True)
        values = values / scales.clamp(min=torch.finfo(torch.float32).tiny)
        codes = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
        rows[:, : BLOCK // 2] = codes[:, ::2] << 4 | codes[:, 1::2]
        rows[:, BLOCK // 2 :] = scales.view(torch.uint8)
    return found


def dequantize(packed: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of :func:`quantize` as a tensor of ``shape``."""
    levels = torch.tensor(LEVELS, device=packed.device)
    pairs = torch.cartesian_prod(levels, levels)  # one for each byte
    codes, scales = packed.split([BLOCK // 2, 4], dim=1)
    values = F.embedding(codes.int(), pairs).flatten(1).mul_(scales.contiguous().view(torch.float32))
    return values.flatten()[: math.prod(shape)].view(*shape).to(dtype)


class _Product(torch.autograd.Function):
    """``F.linear`` that recomputes the floating-point weight in backward instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        return F.linear(inputs.to(dtype), dequantize(packed, shape, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] @ dequantize(ctx.saved_tensors[0], ctx.shape, gradients[0].dtype), None, None


class NF4Linear(nn.Module):
    """Frozen linear layer in four bits.

    Args:
        linear: the layer to quantize; may be on the meta device.

    Attributes:
        weight: uint8 ``(blocks, 36)``, see :func:`quantize`.
        bias: of ``linear``.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(quantize(linear.weight), requires_grad=False)
        self.bias = linear.bias

    @property
    def unpacked_numel(self) -> dict[str, int]:
        """Number of values of each packed parameter."""
        return {"weight": self.in_features * self.out_features}

    def reset_parameters(self) -> None:
        """Set all to 0; trained values come from a file."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        shape = (self.out_features, self.in_features)
        found: Tensor = _Product.apply(inputs, self.weight, shape)
        return found if self.bias is None else found + self.bias.to(found.dtype)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def quantize_frozen(model: nn.Module, head: nn.Module | None) -> list[str]:
    """Replace the frozen linear layers of a model by :class:`NF4Linear`, one at a time.

    Args:
        model: with trained parameters.
        head: stays in floating point.

    Returns:
        Names of the quantized weights, without ``peft``'s additions.

    Raises:
        ValueError: if there is no such layer.
    """
    found = []
    for owner, module in list(model.named_modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear and layer is not head and not layer.weight.requires_grad:
                setattr(module, name, NF4Linear(layer))
                found.append(f"{owner}.{name}.weight".replace(".base_layer.", "."))
    if not found:
        raise ValueError(
            f"adapter.quantize=nf4: {type(model).__name__} has no frozen nn.Linear besides its head (GPT-2 has "
            "convolutions instead). Type adapter=lora"
        )
    return found


class QuantizedSource:
    """Tensors of files, some quantized when read; each rank computes only its blocks.

    Args:
        source: has ``keys``, ``shape``, ``dtype`` and ``read`` by name, tensors in floating point.
        names: weights to quantize; names in ``source`` may lack leading parts.
    """

    def __init__(self, source: Any, names: Collection[str]) -> None:
        self.keys: Callable[[], Collection[str]] = source.keys
        self._source = source
        self._endings = {name.split(".", parts)[-1] for name in names for parts in range(name.count("."))}

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the module."""
        shape: tuple[int, ...] = self._source.shape(key)
        return packed_shape(shape) if key in self._endings else shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor in the module."""
        found: torch.dtype = torch.uint8 if key in self._endings else self._source.dtype(key)
        return found

    def read(self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the box ``[offsets, offsets + sizes)``, computed from the file's rows that contain its blocks."""
        if key not in self._endings:
            whole: Tensor = self._source.read(key, offsets, sizes)
            return whole
        out_features, in_features = self._source.shape(key)
        offsets = offsets or (0, 0)
        sizes = sizes or [size - begin for size, begin in zip(self.shape(key), offsets, strict=True)]
        begin, end = offsets[0] * BLOCK, min((offsets[0] + sizes[0]) * BLOCK, out_features * in_features)
        first = begin // in_features
        rows = self._source.read(key, (first, 0), (-(-end // in_features) - first, in_features))
        packed = quantize(rows.flatten()[begin - first * in_features : end - first * in_features])
        return packed[:, offsets[1] : offsets[1] + sizes[1]].contiguous()
