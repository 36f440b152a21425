"""Attention as people write it: packed in many ways, with norms, biases, caches and parameters by head."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.base import DIM, LENGTH, Attention, LanguageModel, Layer, gpt, sequences, stack, tokens
from tests.zoo.cells import Row

HEADS, SIZE = 4, DIM // 4
RECOMPUTED = {"activation_checkpointing": "full"}


class Packed(nn.Module):
    """One projection for queries, keys and values: three parts, each of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        b, t, _ = x.shape
        return self.qkv(x).reshape(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*self.parts(x), is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))


class Reshaped(Packed):
    """As in timm: the output takes the input's shape."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(b, n, c))


class PackedByHead(Packed):
    """As in GPT-NeoX: each head's query, key and value side by side."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        b, t, _ = x.shape
        return self.qkv(x).view(b, t, self.num_heads, -1).transpose(1, 2).chunk(3, -1)


class PackedStrided(Packed):
    """Queries, keys and values take turns, so the last dimension is strided."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        b, t, _ = x.shape
        qkv = self.qkv(x).view(b, t, self.num_heads, SIZE, 3).transpose(1, 2)
        return qkv[..., 0], qkv[..., 1], qkv[..., 2]


class NanoGpt(nn.Module):
    """nanoGPT's attention, word for word."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(DIM, 3 * DIM)
        self.c_proj = nn.Linear(DIM, DIM)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.n_head, self.n_embd, self.flash = HEADS, DIM, False
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Alibi(Attention):
    """A slope for each head, computed from how many there are."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, length = q.shape[1], q.shape[2]
        slopes = 2.0 ** -(8.0 / heads * torch.arange(1, heads + 1, device=q.device))
        where = torch.arange(length, device=q.device)
        bias = slopes[:, None, None] * (where[None] - where[:, None]).clamp_max(0)
        causal = torch.full((length, length), float("-inf"), device=q.device).triu(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias + causal)


class AlibiBuffer(Attention):
    """Slopes as a buffer of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = torch.arange(q.shape[2], device=q.device)
        bias = self.slopes[:, None, None] * (where[None] - where[:, None])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class NormsByHead(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(self.q_norm(q), self.k_norm(k), v)


class NormsOfWidth(Attention):
    """A norm over all heads of the query, as in OLMo 2 and ESM-C."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        out = self.attend(self.split(q), self.split(k), self.split(self.v_proj(x)))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class NormsOfWidthByHand(NormsOfWidth):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = self.k_norm = nn.Identity()  # type: ignore[assignment]

    def split(self, x: Tensor) -> Tensor:
        return super().split(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class NormBeforeOutput(Attention):
    """A norm over all heads before the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner_norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.inner_norm(self.heads(x).transpose(1, 2).flatten(2)))


class Linear(Attention):
    """Linear attention by a running sum over positions, all heads in one width."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.elu(self.q_proj(x)) + 1, F.elu(self.k_proj(x)) + 1, self.v_proj(x)
        state = torch.einsum("btd,bte->btde", k, v).cumsum(1)
        norm = torch.einsum("btd,btd->bt", q, k.cumsum(1)).unsqueeze(-1)
        return self.o_proj(torch.einsum("btd,btde->bte", q, state) / norm)


class Grouped(nn.Module):
    """Fewer key and value heads than query heads."""

    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, kv_heads, SIZE
        self.q_proj, self.o_proj = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(DIM, kv_heads * SIZE, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Torch(nn.Module):
    """torch's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class Rotary(Attention):
    def turn(self, x: Tensor) -> Tensor:
        rates = 100.0 ** -torch.arange(0, 1, 2 / SIZE, device=x.device)
        angle = torch.outer(torch.arange(float(x.shape[2]), device=x.device), rates)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(self.turn(q), self.turn(k), v)


class RotaryTable(Attention):
    """Rotary embeddings from tables in buffers, of as many rows as there are positions."""

    def __init__(self) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(32.0), 100.0 ** -torch.arange(0, 1, 2 / SIZE)).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin()[None, None], persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos[: x.shape[2]] + torch.cat((-b, a), -1) * self.sin[:, :, : x.shape[2]]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(self.turn(q), self.turn(k), v)


class RotaryKept(RotaryTable):
    """Tables that grow with the longest input."""

    def turn(self, x: Tensor) -> Tensor:
        if x.shape[2] > getattr(self, "rows", 0):
            angle = torch.outer(torch.arange(float(x.shape[2])), 100.0 ** -torch.arange(0, 1, 2 / SIZE)).repeat(1, 2)
            self.rows, self.cos, self.sin = x.shape[2], angle.cos(), angle.sin()[None, None]
        return super().turn(x)


class TrainedPositions(Attention):
    """Trained positions in each block, and a mask from a table."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.more = nn.Parameter(torch.randn(1, 32, DIM) / 10), nn.Embedding(32, DIM)
        self.register_buffer("mask", torch.ones(32, 32, dtype=torch.bool).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        return super().forward(x + self.where[:, :length] + self.more(torch.arange(length, device=x.device)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[..., : q.shape[2], : q.shape[2]])


class RelativeBias(Attention):
    """T5's bias: a table of positions by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(2 * LENGTH, HEADS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = torch.arange(q.shape[2], device=q.device)
        bias = self.bias(where[None] - where[:, None] + LENGTH).permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class TalkingHeads(Attention):
    """Mixes the scores of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(HEADS) + 0.1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("hg,bgqk->bhqk", self.mix, q @ k.mT / math.sqrt(SIZE))
        return scores.softmax(-1) @ v


class Temperature(Attention):
    """A trained temperature for each head, on normalized queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.linspace(1, 2, HEADS)[:, None, None])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature
        return scores.softmax(-1) @ v


class Sinks(Attention):
    """A trained score for each head that takes attention away from all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sink = self.sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        return torch.cat((q @ k.mT, sink), -1).softmax(-1)[..., :-1] @ v


class NullKey(Attention):
    """A trained key and value before all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.null = nn.Parameter(torch.randn(2, 1, 1, SIZE))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat((n.expand(*x.shape[:2], -1, -1), x), 2) for n, x in zip(self.null, (k, v), strict=True))
        return F.scaled_dot_product_attention(q, k, v)


class GatedHeads(Attention):
    """A gate for each head from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj((self.heads(x) * self.gate(x).mT.unsqueeze(-1).sigmoid()).transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Keys and values through a narrow layer with a norm, as in DeepSeek."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.o_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.kv_down, self.kv_norm, self.kv_up = nn.Linear(DIM, 6), nn.RMSNorm(6), nn.Linear(6, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
        kv = self.kv_up(self.kv_norm(self.kv_down(x))).unflatten(-1, (-1, 2 * SIZE)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, *kv.chunk(2, -1), is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Einsum(nn.Module):
    """Weights with a dimension for heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Parameter(0.2 * torch.randn(HEADS, DIM, SIZE)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bhte", x, w) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.einsum("bhte,hde->btd", out, self.wo)


class Differential(Attention):
    """The difference of two maps of attention, heads in pairs."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        maps = (q @ k.mT / math.sqrt(SIZE)).softmax(-1)
        return (maps - 0.3 * maps.roll(1, 1)) @ v


class FirstHeadOnly(Attention):
    """Adds what the first head found to all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(q, k, v)
        return out + out[:, :1]


def lm(attention: Callable[[], nn.Module]) -> Callable[[], LanguageModel]:
    """A GPT with this attention."""
    return gpt(partial(Layer, attention))


ROWS = [
    Row(
        "separate projections",
        lm(Attention),
        tokens,
        equal="zero3, tensor, sequence, pipeline, context, ulysses, gather, pipeline x tensor",
    ),
    Row("packed", lm(Packed), tokens, equal="tensor, context"),
    Row("packed, reshaped to the input", lm(Reshaped), tokens, equal="tensor, context"),
    Row("packed by head", lm(PackedByHead), tokens, equal="tensor, context"),
    Row("packed, strided", lm(PackedStrided), tokens, equal="tensor, context"),
    Row("nanoGPT", lm(NanoGpt), tokens, equal="tensor", either="context"),
    Row("ALiBi", lm(Alibi), tokens, equal="tensor", either="context"),
    Row("ALiBi in a buffer", lm(AlibiBuffer), tokens, equal="tensor", either="context"),
    Row("norms by head", lm(NormsByHead), tokens, equal="tensor, context"),
    Row("norms of the full width", lm(NormsOfWidth), tokens, equal="tensor, context, pipeline x tensor"),
    Row("norms of the full width, by hand", lm(NormsOfWidthByHand), tokens, equal="tensor, pipeline x tensor"),
    Row("norm before the output", lm(NormBeforeOutput), tokens, equal="tensor, sequence"),
    Row("linear", lm(Linear), tokens, equal="tensor", either="context"),
    Row("grouped queries", lm(Grouped), tokens, equal="tensor, context"),
    Row("one key head", lm(partial(Grouped, 1)), tokens, either="tensor, context"),
    Row("MultiheadAttention", lm(Torch), tokens, equal="tensor", either="context"),
    Row("rotary", lm(Rotary), tokens, equal="tensor, context, ulysses"),
    Row("rotary, recomputed", lm(Rotary), tokens, equal="context", options={"context": RECOMPUTED}),
    Row("rotary from tables", lm(RotaryTable), tokens, equal="context, context x shard"),
    Row("rotary from growing tables", lm(RotaryKept), tokens, equal="tensor", either="context"),
    Row("positions and masks in blocks", lm(TrainedPositions), tokens, equal="tensor, context, context x shard"),
    Row("relative bias", lm(RelativeBias), tokens, equal="tensor", either="context"),
    Row("talking heads", lm(TalkingHeads), tokens, equal="tensor", either="context"),
    Row("temperature by head", lm(Temperature), tokens, equal="tensor", either="context"),
    Row("sinks", lm(Sinks), tokens, equal="tensor", either="context"),
    Row("null key", lm(NullKey), tokens, equal="tensor", either="context"),
    Row("gates by head", lm(GatedHeads), tokens, equal="tensor", either="context"),
    Row("latent keys", lm(Latent), tokens, equal="tensor", either="context"),
    Row("weights by head", lm(Einsum), tokens, equal="tensor", either="context"),
    Row("differential", lm(Differential), tokens, equal="tensor"),
    Row("the first head for all", lm(FirstHeadOnly), tokens, equal="tensor", either="ulysses"),
    Row("not causal", stack(partial(Layer, partial(Attention, causal=False))), sequences, equal="tensor, context"),
]
