"""Attention over a subset of keys, with the log-sum-exp needed to merge it with that over others.

Uses torch's fused kernels on CPU and CUDA if possible, else plain arithmetic over blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten

# Number of scores in memory at once in plain arithmetic: 64 MiB in float32.
_SCORES_AT_ONCE = 1 << 24


class PartialAttention(NamedTuple):
    """Softmax attention of some queries over some keys.

    Args:
        query: ``(B, H, S, d)``.
        key, value: ``(B, K, U, d)`` and ``(B, K, U, e)``; ``K`` divides ``H``.
        mask: boolean (true: visible) or additive, broadcast to ``(B, H, S, U)``; ``None``: all keys are visible.
        causal: row i sees columns 0 to i; only without a mask and for ``S = U``.
        scale: of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float

    def attend(self) -> tuple[Tensor, Tensor]:
        """Compute attention.

        Returns:
            The result ``(B, H, S, e)``, zero in fully masked rows, and the log-sum-exp of the scores ``(B, H, S)``,
            -inf in such rows, float32 or float64.
        """
        kernel = self._fused
        if kernel == "cpu":
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*self[:3], 0.0, self.causal, scale=self.scale)
            return out, lse
        if kernel == "cuda":
            found = _aten._scaled_dot_product_flash_attention(*self[:3], 0.0, self.causal, False, scale=self.scale)
            return found[0], found[1]
        outs, sums = [], []
        grouped_value = _accurate(self.value).unsqueeze(2)
        for scores, _ in self._score_blocks():
            lse = scores.logsumexp(-1)
            outs.append(_weights(scores, lse) @ grouped_value)
            sums.append(lse)
        return torch.cat(outs, 3).flatten(1, 2).to(self.query.dtype), torch.cat(sums, 3).flatten(1, 2)

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of ``query``, ``key`` and ``value``, whose keys are a subset of all.

        Args:
            grad, out: gradient and value of the result over all keys, ``(B, H, S, e)``.
            lse: log-sum-exp of the scores of all keys, ``(B, H, S)``.
        """
        kernel = self._fused
        if kernel == "cpu":
            d_query, d_key, d_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, *self[:3], out, lse, 0.0, self.causal, scale=self.scale
            )
            return d_query, d_key, d_value
        if kernel == "cuda":
            unused = torch.zeros(2, dtype=torch.int64, device=grad.device)  # dropout state
            lengths = (None, None, self.query.size(2), self.key.size(2))
            further = (*lengths, 0.0, self.causal, unused, unused)
            d_query, d_key, d_value = _aten._scaled_dot_product_flash_attention_backward(
                grad, *self[:3], out, lse.contiguous(), *further, scale=self.scale
            )
            return d_query, d_key, d_value
        return self._plain_backward(grad, out, lse)

    @property
    def _fused(self) -> str | None:
        """The applicable fused kernel: ``cpu``, ``cuda``, or ``None``.

        None with a mask: the CPU's returns a log-sum-exp of 0 for fully masked rows, which are common in a piece of a
        masked sequence.
        """
        query, width = self.query, self.query.size(-1)
        if self.mask is not None or not width == self.key.size(-1) == self.value.size(-1):
            return None
        if query.device.type == "cpu":
            return "cpu"
        fits = query.dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= 256
        return "cuda" if fits and query.device.type == "cuda" else None

    def _plain_backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = (self.key.size(1), -1)
        grouped_query, grouped_grad, grouped_out = (_accurate(t).unflatten(1, groups) for t in (self.query, grad, out))
        along = (grouped_grad * grouped_out).sum(-1, keepdim=True)
        grouped_lse = lse.unflatten(1, groups)
        k, v = _accurate(self.key).unsqueeze(2), _accurate(self.value).unsqueeze(2)
        d_query = torch.empty_like(grouped_query)
        d_key, d_value = torch.zeros_like(k), torch.zeros_like(v)
        for scores, rows in self._score_blocks():
            weights = _weights(scores, grouped_lse[..., rows])
            block = grouped_grad[..., rows, :]
            d_scores = weights * (block @ v.mT - along[..., rows, :]) * self.scale
            d_query[..., rows, :] = d_scores @ k
            d_key += (d_scores.mT @ grouped_query[..., rows, :]).sum(2, keepdim=True)
            d_value += (weights.mT @ block).sum(2, keepdim=True)
        return d_query.flatten(1, 2), d_key.squeeze(2), d_value.squeeze(2)

    def _score_blocks(self) -> Iterator[tuple[Tensor, slice]]:
        """Yield scores ``(B, K, H / K, rows, U)`` by blocks of rows, and the rows."""
        query, key, mask = self.query, self.key, self.mask
        grouped = _accurate(query).unflatten(1, (key.size(1), -1))
        keys = _accurate(key).unsqueeze(2).mT
        length = query.size(2)
        step = max(1, _SCORES_AT_ONCE // max(1, query.size(0) * query.size(1) * key.size(2)))
        if self.causal:
            mask = torch.ones(length, key.size(2), dtype=torch.bool, device=query.device).tril()
        for start in range(0, length, step):
            rows = slice(start, min(start + step, length))
            scores = grouped[..., rows, :] @ keys * self.scale
            if mask is not None:
                visible = _grouped_mask(mask if mask.size(-2) == 1 else mask[..., rows, :], key.size(1))
                scores = scores.masked_fill(~visible, -torch.inf) if visible.dtype is torch.bool else scores + visible
            yield scores, rows


def _grouped_mask(mask: Tensor, kv_heads: int) -> Tensor:
    if mask.ndim < 3:
        return mask
    return mask.unsqueeze(-3) if mask.size(-3) == 1 else mask.unflatten(-3, (kv_heads, -1))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return attention weights, zero in fully masked rows."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _accurate(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()
