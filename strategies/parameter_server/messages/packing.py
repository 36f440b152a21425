"""Optimizer states as bytes: a JSON header and the tensors' memory."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.core.text.bounded import ContentError, parse_json
from trainwright.strategies.parameter_server.messages.wire import reading

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)}
_DTYPES |= {str(dtype): dtype for dtype in (torch.int32, torch.uint8, torch.int8, torch.bool)}

State = dict[str, Any]


def pack(states: Sequence[State]) -> tuple[Tensor, int]:
    """Return states as bytes (uint8) and the length of their JSON header.

    Raises:
        ValueError: for values other than tensors, plain numbers, strings or ``None``.
    """
    tensors: list[Tensor] = []

    def described(value: Any) -> Any:
        if isinstance(value, Tensor) and str(value.dtype) in _DTYPES:
            tensors.append(value.detach().cpu().contiguous())
            return {"dtype": str(value.dtype), "shape": list(value.shape)}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        raise ValueError(f"Servers cannot send a {type(value).__name__} of an optimizer (allowed: tensors, numbers).")

    tree = [{key: described(value) for key, value in state.items()} for state in states]
    text = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    return torch.cat([text, *(tensor.view(-1).view(torch.uint8) for tensor in tensors)]), text.numel()


def unpack(data: Tensor, text: int) -> list[State]:
    """Return the states of a :func:`pack` message, as copies.

    Raises:
        ContentError: if ``data`` is malformed.
    """
    position = text

    def value(described: dict[str, Any]) -> Any:
        nonlocal position
        if "dtype" not in described:
            return described["value"]
        dtype, shape = _DTYPES[described["dtype"]], described["shape"]
        size = math.prod(shape) * dtype.itemsize
        if not 0 <= size <= data.numel() - position or min(shape, default=0) < 0:
            raise ContentError(f"a tensor of shape {shape} is not in a message of {data.numel()} bytes")
        piece = data[position : position + size].clone()
        position += size
        return piece.view(dtype).view(shape)

    with reading("a state"):
        tree = parse_json(bytes(data[:text].numpy()))
        return [{key: value(described) for key, described in state.items()} for state in tree]
