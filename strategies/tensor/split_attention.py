"""``nn.MultiheadAttention`` with split heads.

``F.multi_head_attention_forward`` asserts that projections are as wide as the input, which does not hold for a subset
of heads. This computes the same from local weights, up to the output projection.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def attend(
    part: nn.MultiheadAttention,
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    need_weights: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of this rank's heads.

    Args:
        part: with this rank's part of the input projections.
        group: ranks of the tensor axis, in the order of the heads.
        query: ``(L, E)``, ``(L, N, E)`` or with ``batch_first`` ``(N, L, E)``.
        key: likewise, with ``S`` positions.
        value: likewise.
        key_padding_mask: ``(N, S)`` or ``(S,)``; boolean (``True``: ignored) or added.
        attn_mask: ``(L, S)`` or ``(N x all heads, L, S)``; boolean (``True``: ignored) or added.
        need_weights: also return the weights, after dropout.
        is_causal: a hint that ``attn_mask`` is the causal mask.

    Returns:
        Mixed values in the layout of ``query`` with this rank's features, and the weights ``(N, local heads, L, S)``
        or ``None``; without ``N`` for unbatched input.

    Raises:
        RuntimeError: if ``is_causal`` is given without ``attn_mask``.
    """
    if is_causal and attn_mask is None:
        raise RuntimeError("nn.MultiheadAttention was given is_causal=True without attn_mask; give the mask, too.")
    is_batched = query.dim() == 3
    if not is_batched:
        query, key, value = query[None], key[None], value[None]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    elif not part.batch_first:
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    q, k, v = (x.unflatten(-1, (-1, part.head_dim)).transpose(1, 2) for x in _project(part, query, key, value))
    # Without other masks, the hint avoids materializing the causal mask.
    use_hint = is_causal and key_padding_mask is None and not need_weights
    mask = None if use_hint else _merged(attn_mask, key_padding_mask, q, group)
    dropout = part.dropout if part.training else 0.0
    if need_weights:
        weights = _weights(q, k, mask, dropout)
        mixed = weights @ v
    else:
        weights = None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=use_hint)
    mixed = mixed.transpose(1, 2).flatten(2)
    if not is_batched:
        return mixed[0], None if weights is None else weights[0]
    return mixed if part.batch_first else mixed.transpose(0, 1), weights


def _project(part: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    bias = part.in_proj_bias
    if part.in_proj_weight is not None and query is key and key is value:
        return F.linear(query, part.in_proj_weight, bias).chunk(3, -1)
    weights = (
        (part.q_proj_weight, part.k_proj_weight, part.v_proj_weight)
        if part.in_proj_weight is None
        else part.in_proj_weight.chunk(3)
    )
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))


def _merged(attn: Tensor | None, padding: Tensor | None, q: Tensor, group: dist.ProcessGroup) -> Tensor | None:
    """Return one additive mask ``(N or 1, heads or 1, L or 1, S)``, or ``None``."""
    batch, heads = q.shape[:2]
    masks = []
    if attn is not None:
        if attn.dim() == 3:
            attn = attn.unflatten(0, (batch, -1)).narrow(1, group.rank() * heads, heads)
        else:
            attn = attn[None, None]
        masks.append(_added(attn, q.dtype))
    if padding is not None:
        masks.append(_added(padding[:, None, None, :], q.dtype))
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] + masks[1]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    weights = F.softmax(scores if mask is None else scores + mask, -1)
    return F.dropout(weights, dropout) if dropout else weights
