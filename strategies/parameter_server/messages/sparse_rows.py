"""Gradients with few nonzero rows, as pushed for embeddings.

A message holds, for every slice of the server, the number of its rows (-1: all of them), then the row indices, then the
values. Missing rows are zero, so the server reconstructs the dense gradient without loss and any optimizer can step it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainwright.strategies.parameter_server.server.sharder import Slice, places

_WHOLE = -1


class Rows(NamedTuple):
    """Some rows of a slice.

    Args:
        numbers: row indices, int64 ``(k,)``, ascending.
        values: ``(k, ...)``.
    """

    numbers: Tensor
    values: Tensor


def touched_rows(gradient: Tensor, piece: Slice) -> Rows | None:
    """Return the nonzero rows of a slice of a gradient, on the CPU; ``None`` if they are no shorter than the slice.

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
    if numbers.numel() * (width + 2) >= piece.numel:  # an index is as long as two values
        return None
    return Rows(numbers.cpu(), values.cpu())


def pack_rows(flat: Tensor, pieces: Sequence[Slice], rows: Sequence[Rows | None]) -> Tensor:
    """Return a message, uint8 ``(bytes,)``.

    Args:
        flat: the server's slices, concatenated; ignored where rows are given.
        pieces: the slices.
        rows: of each slice; ``None``: all.
    """
    counts = torch.tensor([_WHOLE if each is None else each.numbers.numel() for each in rows], dtype=torch.int64)
    numbers = [each.numbers for each in rows if each is not None]
    values = [
        place if each is None else each.values.to(flat.dtype).flatten()
        for (_, place), each in zip(places(pieces, flat), rows, strict=True)
    ]
    return torch.cat([each.contiguous().view(torch.uint8) for each in (counts, *numbers, torch.cat(values))])


def unpack_rows(message: Tensor, pieces: Sequence[Slice], dtype: torch.dtype) -> Tensor:
    """Return the dense gradient of a server's slices, concatenated.

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
    taken = read = 0
    for (piece, target), count in zip(places(pieces, flat), counts, strict=True):
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
    """Return those of the ascending row indices ``numbers`` in a slice, relative to its start."""
    first, last = torch.searchsorted(numbers, torch.tensor([piece.start, piece.stop])).tolist()
    return numbers[first:last] - piece.start


def ask_for(rows: Sequence[Tensor]) -> Tensor:
    """Return a request for rows of each slice of a server, int64: counts, then row indices."""
    return torch.cat([torch.tensor([each.numel() for each in rows], dtype=torch.int64), *rows])


def look_up(request: Tensor, slices: Sequence[Tensor]) -> Tensor:
    """Return the rows of a :func:`ask_for` request, concatenated.

    Args:
        request: int64.
        slices: of the server, each in its shape.

    Raises:
        ValueError: if a row does not exist.
    """
    counts = request[: len(slices)].tolist()
    numbers = request[len(slices) :].split(counts)
    for own, held in zip(numbers, slices, strict=True):
        if own.numel() and not 0 <= int(own.min()) <= int(own.max()) < len(held):
            raise ValueError(f"rows {int(own.min())} to {int(own.max())} were requested of a slice of {len(held)} rows")
    return torch.cat([held[own].flatten() for own, held in zip(numbers, slices, strict=True) if own.numel()])
