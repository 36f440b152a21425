"""Decoder-only transformer with mixtures of experts as feed-forward layers, based on :mod:`recipes.gpt.model`.

Like there, every submodule with parameters defines ``reset_parameters()``.
"""

# Shape suffixes: those of gpt/model.py, and E = experts, K = experts per token, N = tokens (B x T), P = N x K pairs of
# a token and one of its experts.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.recipes.gpt.model import GPT, Block, GPTConfig, Linear, rotary_angles


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    """Sizes of a :class:`MoEGPT`. ``hidden`` is the width inside one expert.

    ``hidden=None`` divides the width of the dense model by ``experts_per_token``, rounded up to a multiple of 64: a
    token then costs as much as in the dense model, but there are ``experts / experts_per_token`` times its parameters.
    """

    experts: int = 8
    """Experts per block."""
    experts_per_token: int = 2
    """Experts chosen per token, at most ``experts``."""
    balance: float = 0.01
    """Weight of the load-balancing loss; 0 is off."""

    def __post_init__(self) -> None:
        if self.experts < 1 or not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"Impossible mixture of experts: experts={self.experts} with experts_per_token="
                f"{self.experts_per_token} (allowed: 1 or more, and at most experts)."
            )
        if self.balance < 0:
            raise ValueError(
                f"Impossible mixture of experts: balance={self.balance} (allowed: 0, which is off, or more)."
            )
        super().__post_init__()

    @property
    def feed_forward_dim(self) -> int:
        """Width inside one expert, with the default resolved."""
        if self.hidden is not None:
            return self.hidden
        return 64 * math.ceil(self.dim * 8 / 3 / self.experts_per_token / 64)


class BalanceStatistics(NamedTuple):
    """Balance statistics of the blocks so far, passed along the residual stream so that any cut of the model has them.

    Both are float32 scalars, summed over blocks.
    """

    balance: Tensor
    """Load-balancing loss; at best 1 per block."""
    load: Tensor
    """Tokens of the busiest expert relative to the mean; at best 1 per block. Has no gradient."""


class Routes(NamedTuple):
    """Routing of tokens to experts."""

    probabilities_NE: Tensor  # noqa: N815
    """Softmax over all experts, float32."""
    index_NK: Tensor  # noqa: N815
    """The chosen experts, most likely first."""
    weights_NK: Tensor  # noqa: N815
    """Softmax over the chosen ones, float32."""


class Router(Linear):
    """Router that chooses the experts with the largest products of a token and one vector per expert, in float32."""

    def __init__(self, config: MoEConfig) -> None:
        self.experts_per_token = config.experts_per_token
        super().__init__(config.dim, config.experts, config.init_std)

    def forward(self, x_ND: Tensor) -> Routes:  # type: ignore[override]  # noqa: N803
        """Return the routes of tokens ``(N, D)``."""
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = F.linear(x_ND.float(), self.weight.float())  # noqa: N806
            chosen = logits_NE.topk(self.experts_per_token, dim=-1)
            return Routes(logits_NE.softmax(-1), chosen.indices, chosen.values.softmax(-1))


class Experts(nn.Module):
    """SwiGLU layers, one per expert, with matrices stacked along dim 0.

    It has the calling convention of experts in Hugging Face transformers, which strategies can distribute over ranks.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.std, self.residual_std = config.init_std, config.residual_std
        inner, outer = (config.experts, config.feed_forward_dim, config.dim), (config.experts, config.dim)
        self.gate = nn.Parameter(torch.empty(inner))
        self.up = nn.Parameter(torch.empty(inner))
        self.down = nn.Parameter(torch.empty(*outer, config.feed_forward_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        nn.init.normal_(self.gate, std=self.std)
        nn.init.normal_(self.up, std=self.std)
        nn.init.normal_(self.down, std=self.residual_std)

    def forward(self, tokens_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:  # noqa: N803
        """Return the weighted sum of each token's experts, ``(N, D)`` in the tokens' dtype."""
        flat = index_NK.flatten()
        by_expert_P = flat.argsort(stable=True)  # noqa: N806
        token_P = by_expert_P // index_NK.shape[1]  # noqa: N806
        count_E = flat.new_zeros(self.num_experts).scatter_add_(0, flat, torch.ones_like(flat))  # noqa: N806
        y_PD = self._by_expert(tokens_ND[token_P], count_E) * weights_NK.flatten()[by_expert_P, None]  # noqa: N806
        return torch.zeros_like(tokens_ND).index_add(0, token_P, y_PD.to(tokens_ND.dtype))

    def _by_expert(self, x_PD: Tensor, count_E: Tensor) -> Tensor:  # noqa: N803
        """Return the outputs ``(P, D)`` of rows that are grouped by expert."""
        matrices, device = (self.gate, self.up, self.down), x_PD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_PD.dtype
        if dtype == torch.bfloat16 and not any(length % 8 for length in self.gate.shape[1:]):
            # One kernel for all experts without syncing the counts; it needs explicit casts and rows of 16 bytes.
            offsets = count_E.cumsum(0).to(torch.int32)
            return _swiglu(partial(_grouped, offsets), x_PD.to(dtype), *(each.to(dtype) for each in matrices))
        # One expert after the other, whose numbers stay in the cache.
        of_experts = zip(x_PD.split(count_E.tolist()), *(each.unbind() for each in matrices), strict=True)
        return torch.cat([_swiglu(F.linear, *each) for each in of_experts])


def _swiglu(linear: Callable[[Tensor, Tensor], Tensor], x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def _grouped(offsets: Tensor, x_PD: Tensor, weight_EFD: Tensor) -> Tensor:  # noqa: N803
    """Multiply rows, grouped by expert, with the matrix of their expert: ``(P, F)``."""
    return F.grouped_mm(x_PD, weight_EFD.mT, offs=offsets)


class MixtureOfExperts(nn.Module):
    """Feed-forward layer in which every token uses a few experts."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, BalanceStatistics]:  # noqa: N803
        """Map ``(B, T, D)`` to ``(B, T, D)``, and return balance statistics."""
        x_ND = x_BTD.flatten(0, 1)  # noqa: N806
        routes = self.router(x_ND)
        y_ND = self.experts(x_ND, routes.index_NK, routes.weights_NK)  # noqa: N806
        return y_ND.view_as(x_BTD), balance_statistics(routes, len(x_BTD))


def balance_statistics(routes: Routes, sequences: int) -> BalanceStatistics:
    """Return how evenly ``sequences`` of equal length were spread over experts.

    The loss is that of Switch Transformer (arXiv:2101.03961, eq. 4 to 6): E x the sum over experts of (part of the
    choices) x (mean probability), computed per sequence and averaged, as in DeepSeek-V3 (arXiv:2412.19437, eq. 17 to
    20). Over a whole batch it would depend on the division of the batch into ranks and micro-batches. (If a strategy
    splits sequences, each part counts as one, which does change it.)
    """
    experts = routes.probabilities_NE.shape[1]
    chosen_NE = torch.zeros_like(routes.probabilities_NE).scatter_add_(  # noqa: N806
        1, routes.index_NK, torch.ones_like(routes.weights_NK)
    )
    part_BE = chosen_NE.view(sequences, -1, experts).mean(1) / routes.index_NK.shape[1]  # noqa: N806
    likely_BE = routes.probabilities_NE.view(sequences, -1, experts).mean(1)  # noqa: N806
    return BalanceStatistics(
        balance=experts * (part_BE * likely_BE).sum(1).mean(), load=experts * part_BE.mean(0).max().detach()
    )


class MoEBlock(Block):
    """Attention and a mixture of experts, each applied to the normalized residual stream and added to it."""

    feed_forward_class = MixtureOfExperts

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        self.is_balanced = config.balance > 0

    def forward(  # type: ignore[override]
        self,
        x_BTD: Tensor,  # noqa: N803
        counted: BalanceStatistics,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, BalanceStatistics]:
        """Map ``(B, T, D)`` to ``(B, T, D)``, and add this block's statistics. RoPE's angles are ``(T, H / 2)``."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos, sin)  # noqa: N806
        y_BTD, own = self.feed_forward(self.feed_forward_norm(x_BTD))  # noqa: N806
        balance = own.balance if self.is_balanced else own.balance.detach()
        return x_BTD + y_BTD, BalanceStatistics(counted.balance + balance, counted.load + own.load)


class MoEGPT(GPT):
    """Language model from token ids to logits of the next token, with balance statistics."""

    block_class = MoEBlock

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, BalanceStatistics]:  # type: ignore[override]  # noqa: N803
        """Map integer ids ``(B, T)`` to logits ``(B, T, V)``, and return the mean statistics of the blocks."""
        x_BTD: Tensor = self.embedding(tokens_BT)  # noqa: N806
        angles = rotary_angles(tokens_BT.size(1), self.config.head_dim, self.config.rope_base, tokens_BT.device)
        zero = torch.zeros((), dtype=torch.float32, device=tokens_BT.device)
        counted = BalanceStatistics(zero, zero)
        for block in self.blocks:
            x_BTD, counted = block(x_BTD, counted, *angles)  # noqa: N806
        return self.logits(x_BTD), BalanceStatistics(*(value / self.config.layers for value in counted))
