"""Attention over a split sequence compared with one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.strategies.contract.traffic import Collective, recorded
from trainwright.strategies.compose.engine_options import ATTENTION as METHODS
from trainwright.strategies.context.attention import DistributedAttention, heads_problem
from trainwright.strategies.context.documents import ATTENTION, attend_documents, document_attention, document_mask
from trainwright.strategies.context.order import SequenceOrder

LENGTH = 24


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
    if kind == "documents":
        starts = torch.tensor([[0] * 7 + [7] * 12 + [19] * 5, [0] * 24])
        return document_mask(starts[:, None, None])
    return None


def starts_of(kind: str | None) -> torch.Tensor | None:
    """Return the starts of documents, the first position that each row of their mask sees."""
    return mask_of(kind).int().argmax(-1)[:, None] if kind == "documents" else None


def tensors(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    heads = (4, kv_heads, kv_heads)
    return [torch.randn(2, h, LENGTH, 8).to(dtype).requires_grad_() for h in heads]


def attend(attention: Any, inputs: list[torch.Tensor], mask: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Result and gradients of queries, keys and values; the gradient of the result is its cosine."""
    further = {name: value for name, value in kwargs.items() if name != "strided"}
    # Transposed in memory: features of a position do not stand side by side.
    given = [t.mT.contiguous().mT for t in inputs] if kwargs.get("strided") else inputs
    out = attention(*given, attn_mask=mask, **further)
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
    (4, None, torch.float32, {"is_causal": True, "strided": True}),
    (2, "documents", torch.float32, {"enable_gqa": True}),
]


def split_attention(method: str, balance: bool, local_padding: bool) -> list[list[torch.Tensor]]:
    """Every case, whole again."""
    group = dist.group.WORLD
    order = SequenceOrder.of(group, balance)
    attention = DistributedAttention(group, order, method)
    results = []
    for kv_heads, kind, dtype, kwargs in CASES:
        inputs = [order.part(t.detach(), 2).requires_grad_() for t in tensors(kv_heads, dtype)]
        mask = starts_of(kind) if kind == "documents" else mask_of(kind)
        if kind == "padding" and local_padding:
            mask = order.part(mask, 3)
        parts = attend(attention, inputs, mask, kwargs)
        results.append([whole(part, order) for part in parts])
    return results


def whole(part: torch.Tensor, order: SequenceOrder) -> torch.Tensor:
    parts = [torch.empty_like(part.contiguous()) for _ in range(order.size)]
    dist.all_gather(parts, part.contiguous())
    return order.whole(parts, 2)


@pytest.mark.sample(5)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("world_size", "balance"), [(2, True), (4, True), (2, False)])
def test_attention_matches_one_process(ranks, method, world_size, balance):
    results = ranks(split_attention, world_size, method, balance, world_size == 2, timeout=60)
    for i, (kv_heads, kind, dtype, kwargs) in enumerate(CASES):
        want = attend(ATTENTION, tensors(kv_heads, dtype), mask_of(kind), kwargs)
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.03}
        for got in (results[0][i], results[-1][i]):
            for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
                assert a.dtype is dtype
                torch.testing.assert_close(a, b, **tolerance, msg=lambda m, n=name, i=i: f"{n} of case {CASES[i]}: {m}")


@pytest.mark.parametrize("scale", [None, 0.7])
def test_documents_match_a_mask(scale):
    starts, mask = starts_of("documents"), mask_of("documents")
    inputs = tensors(2, torch.float64)
    want = attend(ATTENTION, inputs, mask, {"enable_gqa": True, "scale": scale})
    got = attend(
        lambda *given, attn_mask, **further: document_attention(*given, attn_mask, **further),
        inputs,
        starts,
        {"scale": scale},
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(document_mask(starts, torch.tensor([3, 20])), mask[:, :, [3, 20]])


def test_masked_scores_of_documents_are_not_computed():
    scores = []

    def attention(query, key, *given, **further):
        scores.append(query.size(2) * key.size(2))
        return ATTENTION(query, key, *given, **further)

    starts = (torch.arange(512) // 64 * 64).view(1, 1, 1, -1)
    attend_documents(attention, *(torch.randn(1, 2, 512, 8) for _ in range(3)), starts, 0.0, None)
    assert scores == [64 * 64] * 8


def elements_sent(method: str, causal: bool) -> tuple[int, int]:
    """Elements that this rank sends in forward and in backward."""
    order = SequenceOrder.of(dist.group.WORLD, True)
    attention = DistributedAttention(dist.group.WORLD, order, method)
    inputs = [order.part(t.detach(), 2).requires_grad_() for t in tensors(2, torch.float32)]
    with recorded() as forward:
        out = attention(*inputs, is_causal=causal, enable_gqa=True)
    with recorded() as backward:
        out.sum().backward()
    return sent(forward, order.size), sent(backward, order.size)


def sent(collectives: list[Collective], size: int) -> int:
    """Of what is gathered or scattered a rank passes on the parts of the others; a message is sent whole."""
    shares = {"all_gather": (size - 1) / size, "reduce_scatter": (size - 1) / size, "send": 1}
    shares |= {"all_to_all": (size - 1) / size}
    return round(sum(c.elements * shares[c.name] for c in collectives))


@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_traffic_matches_theory(ranks, world_size):
    c = world_size
    queries, kv = 2 * 4 * LENGTH * 8 // c, 2 * 2 * 2 * LENGTH * 8 // c  # held by one rank
    repeated = kv * max(1, c // 2)  # 2 key/value heads for c ranks
    want = {
        "ring": ((c - 1) * kv, 2 * (c - 1) * kv),
        "gather": ((c - 1) * kv, (c - 1) * kv),
        "ulysses": ((2 * queries + repeated) * (c - 1) // c,) * 2,
    }
    for method in METHODS:
        assert set(ranks(elements_sent, world_size, method, True, timeout=30)) == {want[method]}, method


def test_refuses_indivisible_heads():
    assert heads_problem(8, 2, 4) is None
    assert "8 query heads, 2 key/value heads (allowed: context of 1, 2, 4, 8;" in heads_problem(8, 2, 3)


@pytest.mark.parametrize("balance", [True, False])
def test_parts_join_to_the_whole(balance):
    orders = [SequenceOrder(4, rank, balance) for rank in range(4)]
    whole = torch.arange(16.0).view(1, 16)
    torch.testing.assert_close(orders[0].whole([order.part(whole, 1) for order in orders], 1), whole)
    assert orders[1].part(whole, 1).tolist() == ([[2, 3, 12, 13]] if balance else [[4, 5, 6, 7]])
    with pytest.raises(ValueError, match=r"15 positions .* pad or cut it to 16"):
        orders[0].check(15)


def learned_mask(method: str) -> torch.Tensor:
    """Gradient of a mask, summed over the ranks."""
    dist.barrier()  # ranks that refuse could be gone before the others have connected
    order = SequenceOrder.of(dist.group.WORLD, True)
    attention = DistributedAttention(dist.group.WORLD, order, method)
    mask = mask_of("additive").requires_grad_()
    inputs = [order.part(t.detach(), 2) for t in tensors(4, torch.float32)]
    out = attention(*inputs, attn_mask=mask)
    out.backward(out.detach().cos())
    dist.all_reduce(mask.grad)
    return mask.grad


def test_gradient_of_a_learned_mask(ranks):
    mask = mask_of("additive").requires_grad_()
    out = ATTENTION(*[t.detach() for t in tensors(4, torch.float32)], attn_mask=mask)
    out.backward(out.detach().cos())
    for method in ("gather", "ulysses"):
        for got in ranks(learned_mask, 2, method, timeout=30):
            torch.testing.assert_close(got, mask.grad, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="'ring' has no gradient for an attention mask"):
        ranks(learned_mask, 2, "ring", timeout=30)
