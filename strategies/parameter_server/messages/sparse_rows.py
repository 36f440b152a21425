"""Gradients of which few rows are not zero, as those rows and where they belong: what embeddings push.

A message is, for every slice of the server, how many of its rows follow (-1: all of them), then the numbers of the
rows, then their values. Rows that do not follow are zero, so that nothing is lost: the server has the dense gradient,
and any optimizer makes the step that it would make elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainwright.strategies.parameter_server.server.sharder import Slice

_WHOLE = -1


class Rows(NamedTuple):
    """Some rows of a slice.

    Args:
        numbers: int64 ``(k,)``, ascending.
        values: ``(k, ...)``.
    """

    numbers: Tensor
    values: Tensor


def touched_rows(gradient: Tensor, piece: Slice) -> Rows | None:
    """The rows of a slice that a gradient touches, on the CPU; ``None`` if they would be no shorter than the slice.

    Args:
        gradient: of the whole parameter, sparse along its first dim or dense.
        piece: the slice.
    """
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        numbers, values = gradient.indices()[0], gradient.values()
        if gradient.sparse_dim() != 1:
            return None
        mine = (numbers >= piece.start) & (numbers < piece.stop)
        numbers, values = numbers[mine] - piece.start, values[mine]
    else:
        part = gradient[piece.start : piece.stop]
        numbers = part.flatten(1).any(dim=1).nonzero().flatten()
        values = part[numbers]
    width = max(piece.numel // max(piece.stop - piece.start, 1), 1)
    if numbers.numel() * (width + 2) >= piece.numel:  # a number is as long as two values
        return None
    return Rows(numbers.cpu(), values.cpu())


def pack_rows(flat: Tensor, pieces: Sequence[Slice], rows: Sequence[Rows | None]) -> Tensor:
    """A message, uint8 ``(bytes,)``.

    Args:
        flat: the server's slices one after the other; of those whose rows are given it is not looked at.
        pieces: the slices.
        rows: of each slice, ``None``: all.
    """
    counts = torch.tensor([_WHOLE if each is None else each.numbers.numel() for each in rows], dtype=torch.int64)
    parts = flat.split([piece.numel for piece in pieces])
    numbers = [each.numbers for each in rows if each is not None]
    values = [
        part if each is None else each.values.to(flat.dtype).flatten() for part, each in zip(parts, rows, strict=True)
    ]
    return torch.cat([each.contiguous().view(torch.uint8) for each in (counts, *numbers, torch.cat(values))])


def unpack_rows(message: Tensor, pieces: Sequence[Slice], dtype: torch.dtype) -> Tensor:
    """The dense gradient of a server's slices, one after the other.

    Raises:
        ValueError: if the message does not fit the slices.
    """
    flat = torch.zeros(sum(piece.numel for piece in pieces), dtype=dtype)
    head = 8 * len(pieces)
    counts = message[:head].clone().view(torch.int64).tolist()
    if any(not _WHOLE <= count <= piece.numel for count, piece in zip(counts, pieces, strict=True)):
        raise ValueError(f"{counts} rows were pushed for slices of {[piece.numel for piece in pieces]} numbers")
    listed = sum(count for count in counts if count != _WHOLE)
    numbers = message[head : head + 8 * listed].clone().view(torch.int64)
    values = message[head + 8 * listed :].clone().view(dtype)
    first = taken = read = 0
    for piece, count in zip(pieces, counts, strict=True):
        target = flat[first : first + piece.numel]
        first += piece.numel
        if count == _WHOLE:
            target.copy_(values[read : read + piece.numel])
            read += piece.numel
            continue
        length, width = piece.stop - piece.start, piece.numel // max(piece.stop - piece.start, 1)
        own = numbers[taken : taken + count]
        if count and not 0 <= int(own.min()) <= int(own.max()) < length:
            raise ValueError(f"rows {int(own.min())} to {int(own.max())} were pushed for a slice of {length} rows")
        target.view(length, width).index_copy_(0, own, values[read : read + count * width].view(count, width))
        taken, read = taken + count, read + count * width
    return flat


def rows_within(numbers: Tensor, piece: Slice) -> Tensor:
    """Those of ascending ``numbers`` of rows that lie in a slice, counted from its first."""
    first, last = torch.searchsorted(numbers, torch.tensor([piece.start, piece.stop])).tolist()
    return numbers[first:last] - piece.start


def ask_for(rows: Sequence[Tensor]) -> Tensor:
    """A request for some rows of each slice of a server, int64: how many of each slice, then their numbers."""
    return torch.cat([torch.tensor([each.numel() for each in rows], dtype=torch.int64), *rows])


def look_up(request: Tensor, slices: Sequence[Tensor]) -> Tensor:
    """The rows that a request of :func:`ask_for` wants, one after the other.

    Args:
        request: what was asked.
        slices: of the server, each in its shape.

    Raises:
        ValueError: if a slice has no such row.
    """
    counts = request[: len(slices)].tolist()
    numbers = request[len(slices) :].split(counts)
    for own, held in zip(numbers, slices, strict=True):
        if own.numel() and not 0 <= int(own.min()) <= int(own.max()) < len(held):
            raise ValueError(f"rows {int(own.min())} to {int(own.max())} were asked for of a slice of {len(held)} rows")
    return torch.cat([held[own].flatten() for own, held in zip(numbers, slices, strict=True) if own.numel()])
