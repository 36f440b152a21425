"""Attention of transformers' models within the documents of packed rows, without a mask of all pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainwright import document_attention, document_mask


def register_document_attention() -> str:
    """Register :func:`trainwright.document_attention` with transformers; returns its ``attn_implementation``.

    A mask that is causal within documents becomes their starts; any other is left to ``sdpa``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = document_attention.__name__
    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, _mask)
    return name


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    forward: Any = sdpa_attention_forward
    if attention_mask is None or attention_mask.dtype is not torch.int64:
        return forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if any(options.get(name) is not None for name in ("position_bias", "softcap", "cache")):
        return forward(module, query, key, value, document_mask(attention_mask), **options)  # type: ignore[no-any-return]
    dropout, scale = options.get("dropout", 0.0), options.get("scaling")
    out = document_attention(query, key, value, attention_mask, dropout, scale)
    return out.transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any, device: torch.device, **options: Any
) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    plain: Any = sdpa_mask
    skips = options.get("allow_is_causal_skip", True) or options.get("use_vmap", False)
    if q_length == kv_length > 1 and not skips and options.get("attention_mask") is None:
        starts = _starts_of(mask_function, batch_size, q_length, torch.device(device))
        if starts is not None:
            return starts
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    mask: Tensor | None = plain(**sizes, mask_function=mask_function, device=device, **options)
    return mask


def _starts_of(sees: Any, batch_size: int, length: int, device: torch.device) -> Tensor | None:
    """Return the starts of documents ``(B, 1, 1, T)``; ``None`` if the mask is not causal within documents.

    Args:
        sees: ``(sequence, head, query, key) -> bool``, on tensors of indices.
    """
    rows = torch.arange(batch_size, device=device)[:, None]
    positions = torch.arange(length, device=device)[None]
    before, after = (positions - 1).clamp(min=0), (positions + 1).clamp(max=length - 1)
    goes_on = sees(rows, 0, positions, before) & (positions > 0)
    starts = torch.where(goes_on, 0, positions).cummax(1).values
    outside = (starts - 1).clamp(min=0)
    is_causal = ~sees(rows, 0, positions, after) | (after == positions)
    sees_first, sees_outside = sees(rows, 0, positions, starts), sees(rows, 0, positions, outside) & (starts > 0)
    fits = (is_causal & sees_first & ~sees_outside).all()
    is_readable = type(fits) is Tensor and not fits.is_meta and not torch.compiler.is_compiling()
    return starts[:, None, None] if is_readable and bool(fits) else None
