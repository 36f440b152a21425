"""Attention over a split sequence against attention of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainwright.strategies.context_attention import METHODS, DistributedAttention
from trainwright.strategies.context_order import SequenceOrder

LENGTH = 24
ATTENTION = F.scaled_dot_product_attention


def mask_of(kind: str | None) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(5)
    if kind == "additive":
        return torch.randn(2, 4, LENGTH, LENGTH, generator=generator)
    if kind == "causal":  # as Hugging Face materialises it, with padding at the left of the second sequence
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()
        mask[1, :, :, :5] = False
        return mask
    if kind == "padding":
        mask = torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)
        mask[1, ..., -7:] = False
        return mask
    return None


def tensors(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    heads = (4, kv_heads, kv_heads)
    return [torch.randn(2, h, LENGTH, 8).to(dtype).requires_grad_() for h in heads]


def attend(attention: Any, inputs: list[torch.Tensor], mask: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Result and gradients of queries, keys and values; the gradient of the result is its cosine."""
    out = attention(*inputs, attn_mask=mask, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, inputs, out.detach().cos())]


CASES = [
    # key/value heads, mask, dtype, other arguments
    (4, None, torch.float32, {"is_causal": True}),
    (4, None, torch.float32, {}),
    (2, None, torch.float32, {"is_causal": True, "enable_gqa": True, "scale": 0.7}),
    (2, "additive", torch.float32, {"enable_gqa": True}),
    (4, "causal", torch.float32, {}),
    (4, "padding", torch.float32, {}),
    (4, None, torch.bfloat16, {"is_causal": True}),
]


def split_attention(method: str, balance: bool, local_padding: bool) -> list[list[torch.Tensor]]:
    """Every case, whole again."""
    group = dist.group.WORLD
    order = SequenceOrder.of(group, balance)
    attention = DistributedAttention(group, order, method, ATTENTION)
    results = []
    for kv_heads, kind, dtype, kwargs in CASES:
        inputs = [order.part(t.detach(), 2).requires_grad_() for t in tensors(kv_heads, dtype)]
        mask = mask_of(kind)
        if kind == "padding" and local_padding:
            mask = order.part(mask, 3)
        parts = attend(attention, inputs, mask, kwargs)
        results.append([whole(part, order) for part in parts])
    return results


def whole(part: torch.Tensor, order: SequenceOrder) -> torch.Tensor:
    parts = [torch.empty_like(part.contiguous()) for _ in range(order.size)]
    dist.all_gather(parts, part.contiguous())
    return order.whole(parts, 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("world_size", "balance"), [(2, True), (4, True), (2, False)])
def test_is_that_of_one_process(ranks, method, world_size, balance):
    results = ranks(split_attention, world_size, method, balance, world_size == 2, timeout=60)
    for i, (kv_heads, kind, dtype, kwargs) in enumerate(CASES):
        want = attend(ATTENTION, tensors(kv_heads, dtype), mask_of(kind), kwargs)
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.03}
        for got in (results[0][i], results[-1][i]):
            for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
                assert a.dtype is dtype
                torch.testing.assert_close(a, b, **tolerance, msg=lambda m, n=name, i=i: f"{n} of case {CASES[i]}: {m}")
