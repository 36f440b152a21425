"""Attention over some of the keys, with what it takes to merge it with attention over others.

Torch's fused kernels on CPU and CUDA where they can (they return the log-sum-exp of the scores, too); else plain
arithmetic over blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_aten = torch.ops.aten

# Scores that plain arithmetic holds at once: 64 MiB in float32.
_SCORES_AT_ONCE = 1 << 24


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention of the rows of ``query`` over the given keys.

    Args:
        query: ``(B, H, S, d)``.
        key, value: ``(B, K, U, d)`` and ``(B, K, U, e)``; ``K`` divides ``H``.
        mask: boolean (true: visible) or added to the scores, to be broadcast to ``(B, H, S, U)``; ``None``: all keys
            are visible.
        causal: row i sees columns 0 to i; without a mask and with ``S = U`` only.
        scale: of the scores.

    Returns:
        The result ``(B, H, S, e)``, zero in rows to which no key is visible; and the log of the sum of the
        exponentials of the scores ``(B, H, S)``, -inf in such rows, float32 or float64.
    """
    kernel = _fused(query, key, value, mask)
    if kernel == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return out, lse
    if kernel == "cuda":
        found = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
        return found[0], found[1]
    outs, sums = [], []
    grouped_value = _accurate(value).unsqueeze(2)
    for scores, _ in _score_blocks(query, key, mask, causal, scale):
        lse = scores.logsumexp(-1)
        outs.append(_weights(scores, lse) @ grouped_value)
        sums.append(lse)
    return torch.cat(outs, 3).flatten(1, 2).to(query.dtype), torch.cat(sums, 3).flatten(1, 2)


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``query``, ``key`` and ``value`` when the keys given are some of all.

    Args:
        grad, out: gradient and value of the result over all keys, ``(B, H, S, e)``.
        lse: log-sum-exp of the scores of all keys, ``(B, H, S)``.
        query, key, value, mask, causal, scale: as in :func:`attend`.
    """
    kernel = _fused(query, key, value, mask)
    if kernel == "cpu":
        d_query, d_key, d_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, causal, scale=scale
        )
        return d_query, d_key, d_value
    if kernel == "cuda":
        unused = torch.zeros(2, dtype=torch.int64, device=query.device)  # the state of dropout
        lengths = (None, None, query.size(2), key.size(2))
        d_query, d_key, d_value = _aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse.contiguous(), *lengths, 0.0, causal, unused, unused, scale=scale
        )
        return d_query, d_key, d_value
    return _plain_backward(grad, query, key, value, out, lse, mask, causal, scale)


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str | None:
    """Which fused kernel can do it: ``cpu``, ``cuda``, or ``None``.

    With a mask there is none: the CPU's gives 0 as log-sum-exp of a row that sees nothing, which is common in a piece
    of a masked sequence and would be merged as if it saw something.
    """
    if mask is not None or not query.size(-1) == key.size(-1) == value.size(-1):
        return None
    if query.device.type == "cpu":
        return "cpu"
    fits = query.dtype in (torch.float16, torch.bfloat16) and query.size(-1) % 8 == 0 and query.size(-1) <= 256
    return "cuda" if fits and query.device.type == "cuda" else None


def _plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = (key.size(1), -1)
    grouped_query, grouped_grad, grouped_out = (_accurate(t).unflatten(1, groups) for t in (query, grad, out))
    along = (grouped_grad * grouped_out).sum(-1, keepdim=True)
    grouped_lse = lse.unflatten(1, groups)
    k, v = _accurate(key).unsqueeze(2), _accurate(value).unsqueeze(2)
    d_query = torch.empty_like(grouped_query)
    d_key, d_value = torch.zeros_like(k), torch.zeros_like(v)
    for scores, rows in _score_blocks(query, key, mask, causal, scale):
        weights = _weights(scores, grouped_lse[..., rows])
        block = grouped_grad[..., rows, :]
        d_scores = weights * (block @ v.mT - along[..., rows, :]) * scale
        d_query[..., rows, :] = d_scores @ k
        d_key += (d_scores.mT @ grouped_query[..., rows, :]).sum(2, keepdim=True)
        d_value += (weights.mT @ block).sum(2, keepdim=True)
    return d_query.flatten(1, 2), d_key.squeeze(2), d_value.squeeze(2)


def _score_blocks(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Iterator[tuple[Tensor, slice]]:
    """Scores ``(B, K, H / K, rows, U)`` of some rows after the other, and which rows these are."""
    grouped = _accurate(query).unflatten(1, (key.size(1), -1))
    keys = _accurate(key).unsqueeze(2).mT
    length = query.size(2)
    step = max(1, _SCORES_AT_ONCE // max(1, query.size(0) * query.size(1) * key.size(2)))
    if causal:
        mask = torch.ones(length, key.size(2), dtype=torch.bool, device=query.device).tril()
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        scores = grouped[..., rows, :] @ keys * scale
        if mask is not None:
            visible = _grouped_mask(mask if mask.size(-2) == 1 else mask[..., rows, :], key.size(1))
            scores = scores.masked_fill(~visible, -torch.inf) if visible.dtype is torch.bool else scores + visible
        yield scores, rows


def _grouped_mask(mask: Tensor, kv_heads: int) -> Tensor:
    if mask.ndim < 3:
        return mask
    return mask.unsqueeze(-3) if mask.size(-3) == 1 else mask.unflatten(-3, (kv_heads, -1))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Attention weights; zero where a row sees nothing, or sees nothing here."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _accurate(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()
