"""A decoder-only transformer: RoPE, grouped-query SDPA, RMSNorm, SwiGLU, tied or untied head.

Every submodule with parameters defines ``reset_parameters()``, its whole initialization, so the model can be
built under ``torch.device("meta")`` and initialized piece by piece.
"""

# Shape suffixes: B = sequences, T = positions, D = model width, N = query heads, K = key/value heads, H = head width,
# F = width inside the feed-forward layer, V = vocabulary.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a :class:`GPT`. The defaults are the size ``nano``."""

    layers: int = 4
    """Number of blocks."""
    dim: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Number of query heads; ``dim / heads`` is the width of a head and must be even (RoPE rotates pairs)."""
    kv_heads: int | None = None
    """Number of key/value heads, a divisor of ``heads``; ``None``: equal to ``heads`` (no grouping)."""
    hidden: int | None = None
    """Width inside the feed-forward layer; ``None``: 8/3 of ``dim``, rounded up to a multiple of 64."""
    seq_len: int = 128
    """Positions of a training sequence. RoPE has no table, so other lengths run too."""
    vocab: int = 256
    """Vocabulary size; 256 is one id per byte."""
    tied_head: bool = True
    """Use the embedding matrix as the output matrix too."""
    rope_base: float = 10_000.0
    """Base of the geometric series of RoPE's wavelengths."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    init_std: float = 0.05
    """Standard deviation of initial weights; projections into the residual stream divide it by sqrt(2 layers)."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("layers", "dim", "heads", "seq_len", "vocab")}
        sizes |= {"kv_heads": self.key_value_heads, "hidden": self.feed_forward_dim}
        problems = [f"{name}={value} (allowed: 1 or more)" for name, value in sizes.items() if value < 1]
        if not problems and (self.dim % self.heads or self.head_dim % 2):
            problems.append(f"dim={self.dim} with heads={self.heads} (allowed: dim a multiple of 2 x heads)")
        if not problems and self.heads % self.key_value_heads:
            problems.append(f"kv_heads={self.kv_heads} with heads={self.heads} (allowed: a divisor of heads)")
        if problems:
            raise ValueError(f"Impossible GPT sizes: {'; '.join(problems)}.")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def key_value_heads(self) -> int:
        """Number of key/value heads, with the default resolved."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def feed_forward_dim(self) -> int:
        """Width inside the feed-forward layer, with the default resolved."""
        return 64 * math.ceil(self.dim * 8 / 3 / 64) if self.hidden is None else self.hidden

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of projections into the residual stream.

        The variances of all ``2 layers`` of them add up; scaled, the sum does not grow with depth (GPT-2, section 2.3).
        """
        return self.init_std / math.sqrt(2 * self.layers)


class Linear(nn.Linear):
    """``nn.Linear`` without bias, initialized from a normal distribution of standard deviation ``std``."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """``nn.Embedding`` initialized from a normal distribution of standard deviation ``std``."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        nn.init.normal_(self.weight, std=self.std)


def rotary_angles(length: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return RoPE's cosines and sines, float32 ``(length, head_dim / 2)`` (Su et al., https://arxiv.org/abs/2104.09864).

    Computed once per forward instead of stored in a buffer, which DDP would broadcast before every forward, half
    precision would round (at position 2,000 bfloat16 angles are off by a full turn), and a meta-device build would have
    to fill. Blocks receive the angles, so a block with a slice of the sequence rotates it by the right positions.
    """
    with torch.autocast(device.type, enabled=False):
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = torch.outer(positions, base ** (-pairs / head_dim))
        return angles.cos(), angles.sin()


def rotate(x_BNTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: N803
    """Rotate each pair (i, i + H/2) of a head by its position's angle in float32; keeps the input's dtype."""
    first, second = x_BNTH.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BNTH.dtype)


class Attention(nn.Module):
    """Causal self-attention with RoPE and grouped key/value heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.key_value_heads
        self.head_dim = config.head_dim
        kv_dim = self.kv_heads * self.head_dim
        self.query = Linear(config.dim, config.dim, config.init_std)
        self.key = Linear(config.dim, kv_dim, config.init_std)
        self.value = Linear(config.dim, kv_dim, config.init_std)
        self.out = Linear(config.dim, config.dim, config.residual_std)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: N803
        """Map ``(B, T, D)`` to the same shape; position t sees positions 0 to t. RoPE's angles are ``(T, H / 2)``."""
        q_BNTH = self._split_heads(self.query(x_BTD), self.heads)  # noqa: N806
        k_BKTH = self._split_heads(self.key(x_BTD), self.kv_heads)  # noqa: N806
        v_BKTH = self._split_heads(self.value(x_BTD), self.kv_heads)  # noqa: N806
        y_BNTH = F.scaled_dot_product_attention(  # noqa: N806
            rotate(q_BNTH, cos, sin),
            rotate(k_BKTH, cos, sin),
            v_BKTH,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.out(y_BNTH.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, x_BTD: Tensor, heads: int) -> Tensor:  # noqa: N803
        x_BTNH: Tensor = x_BTD.unflatten(2, (heads, self.head_dim))  # noqa: N806
        return x_BTNH.transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward layer ``down(silu(gate(x)) * up(x))`` (Shazeer, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.feed_forward_dim, config.init_std)
        self.up = Linear(config.dim, config.feed_forward_dim, config.init_std)
        self.down = Linear(config.feed_forward_dim, config.dim, config.residual_std)

    def forward(self, x_BTD: Tensor) -> Tensor:  # noqa: N803
        """Map ``(B, T, D)`` to ``(B, T, D)``."""
        out: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each applied to the normalized residual stream and added to it."""

    feed_forward_class: type[nn.Module] = SwiGLU

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = self.feed_forward_class(config)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: N803
        """Map ``(B, T, D)`` to ``(B, T, D)``. RoPE's angles are ``(T, H / 2)``."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos, sin)  # noqa: N806
        out: Tensor = x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))
        return out


class GPT(nn.Module):
    """Language model from token ids to logits of the next token.

    With ``config.tied_head`` there is no ``head``: the embedding matrix is used twice, so no parameter has two names
    and nothing must be tied again after a deferred build or a load.
    """

    block_class: type[nn.Module] = Block

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab, config.dim, config.init_std)
        self.blocks = nn.ModuleList(self.block_class(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tied_head else Linear(config.dim, config.vocab, config.init_std)

    def forward(self, tokens_BT: Tensor) -> Tensor:  # noqa: N803
        """Map integer ids ``(B, T)`` to logits ``(B, T, V)``; those at position t are of token t + 1."""
        x_BTD: Tensor = self.embedding(tokens_BT)  # noqa: N806
        angles = rotary_angles(tokens_BT.size(1), self.config.head_dim, self.config.rope_base, tokens_BT.device)
        for block in self.blocks:
            x_BTD = block(x_BTD, *angles)  # noqa: N806
        return self.logits(x_BTD)

    def logits(self, x_BTD: Tensor) -> Tensor:  # noqa: N803
        """Map the residual stream ``(B, T, D)`` after the blocks to logits ``(B, T, V)``."""
        x_BTD = self.norm(x_BTD)  # noqa: N806
        logits_BTV: Tensor = (  # noqa: N806
            F.linear(x_BTD, self.embedding.weight) if self.head is None else self.head(x_BTD)
        )
        return logits_BTV
