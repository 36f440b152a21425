"""Causal attention within the documents of packed sequences."""

# Shapes: B = sequences, H = query heads, K = key-value heads, T = positions, d = width of a head.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Torch's, which a context axis replaces while blocks run.
ATTENTION = F.scaled_dot_product_attention
# Positions up to which a mask takes less time on the CPU than documents by themselves (benchmarks/packed.py).
_SHORT = 256
_VARLEN_DTYPES, _VARLEN_CAPABILITY = (torch.float16, torch.bfloat16), (8, 0)


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, dropout_p: float = 0.0, scale: float | None = None
) -> Tensor:
    """Return attention in which each position sees its document up to itself.

    Equal to ``scaled_dot_product_attention`` with a mask, without its ``T ** 2`` entries and the work for masked
    pairs: documents are computed separately, on CUDA devices in 16-bit precision by one kernel
    (``torch.nn.attention.varlen``). Under a context axis it covers the whole sequences. In compiled code, and for
    tensors without data, the mask is built; for short sequences on the CPU, too.

    Args:
        query: ``(B, H, T, d)``.
        key: ``(B, K, T, d)``; ``K`` divides ``H``.
        value: ``(B, K, T, d)``.
        starts: first position of the document of each position, integer ``(B, 1, 1, T)``; it never falls along T.
        dropout_p: of attention weights; 0: off.
        scale: of the scores; ``None``: one over the root of ``d``.
    """
    attention = F.scaled_dot_product_attention
    if attention is not ATTENTION:  # a context axis; its attention takes starts as a mask
        return attention(query, key, value, starts, dropout_p, scale=scale, enable_gqa=True)
    return attend_documents(attention, query, key, value, starts, dropout_p, scale)


def attend_documents(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Compute :func:`document_attention` of whole sequences.

    Args:
        attention: ``scaled_dot_product_attention``.
        query, key, value, starts, dropout_p, scale: see :func:`document_attention`.
    """
    gqa = query.size(1) != key.size(1)
    is_short = starts.size(-1) <= _SHORT and query.device.type == "cpu"
    if is_short or not is_readable(starts):
        return attention(query, key, value, _mask(starts), dropout_p, scale=scale, enable_gqa=gqa)
    packed = _packed(starts)
    if not dropout_p and _fits_varlen(query, value):
        return _by_varlen(query, key, value, packed, scale)
    rows = []
    for documents, *row in zip(packed.documents, *(each.split(1) for each in (query, key, value)), strict=True):
        # Split rather than sliced: the gradient of a slice has the size of the whole.
        parts = zip(*(each.split([end - begin for begin, end in documents], 2) for each in row), strict=True)
        found = [attention(*part, None, dropout_p, True, scale=scale, enable_gqa=gqa) for part in parts]
        rows.append(torch.cat(found, 2))
    return torch.cat(rows)


def document_mask(starts: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the boolean mask ``(B, 1, rows, T)``, true where a position sees another.

    Args:
        starts: see :func:`document_attention`.
        rows: positions of the rows, ``(rows,)``; ``None``: all.
    """
    columns = torch.arange(starts.size(-1), device=starts.device)
    rows = columns if rows is None else rows
    return (columns <= rows[:, None]) & (columns >= starts[..., rows].transpose(-1, -2))


def is_starts(mask: Tensor) -> bool:
    """Return whether an argument ``attn_mask`` holds the starts of documents."""
    return not mask.is_floating_point() and mask.dtype is not torch.bool


def is_readable(starts: Tensor) -> bool:
    """Return whether the values of ``starts`` can be read: not in compiled code, and not of tensors without data."""
    return type(starts) is Tensor and not starts.is_meta and not torch.compiler.is_compiling()


def documents_of(starts: Tensor) -> list[list[tuple[int, int]]]:
    """Return begin and end of each document, of each sequence."""
    return _packed(starts).documents


class _Packed(NamedTuple):
    """Documents of packed sequences.

    Args:
        documents: begin and end of each document, of each sequence.
        bounds: begins of all documents in the concatenated sequences and the end, int32, on the device.
        longest: positions of the longest document.
    """

    documents: list[list[tuple[int, int]]]
    bounds: Tensor
    longest: int


# By starts, so that a batch is read from the device once for all blocks.
_known, _masks = WeakIdKeyDictionary(), WeakIdKeyDictionary()


def _mask(starts: Tensor) -> Tensor:
    if not is_readable(starts):
        return document_mask(starts)
    found: Tensor | None = _masks.get(starts)
    if found is None:
        found = _masks[starts] = document_mask(starts)
    return found


def _packed(starts: Tensor) -> _Packed:
    found: _Packed | None = _known.get(starts)
    if found is None:
        length = starts.size(-1)
        begins = [sorted(set(row)) for row in starts.view(-1, length).tolist()]
        documents = [list(zip(row, [*row[1:], length], strict=True)) for row in begins]
        flat = [number * length + begin for number, row in enumerate(begins) for begin in row]
        bounds = torch.tensor([*flat, len(begins) * length], dtype=torch.int32, device=starts.device)
        found = _known[starts] = _Packed(documents, bounds, max(end - begin for row in documents for begin, end in row))
    return found


def _fits_varlen(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's kernel for documents, FlashAttention, supports device, dtype and widths."""
    width, device = query.size(-1), query.device.type
    if device != "cuda" or torch.cuda.get_device_capability(query.device) < _VARLEN_CAPABILITY:
        return False
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    return dtype in _VARLEN_DTYPES and width == value.size(-1) and width % 8 == 0 and width <= 256


def _by_varlen(query: Tensor, key: Tensor, value: Tensor, packed: _Packed, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, length, _ = query.shape
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    key, value = (t.repeat_interleave(heads // t.size(1), 1) for t in (key, value))
    q, k, v = (t.transpose(1, 2).reshape(batch * length, heads, -1) for t in (query, key, value))
    bounds, longest = packed.bounds, packed.longest
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out.view(batch, length, heads, -1).transpose(1, 2)
