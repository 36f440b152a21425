"""Networks of fuzzed programs: vectors ``(B, 16)`` or token ids ``(B, T)`` to scores ``(B, 4)`` or ``(B, T, 4)``.

Each class also appears in the scripts that reproduce a failure, so it is written as a user would write it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, CLASSES, VOCABULARY, LENGTH, DEPTH = 16, 4, 12, 8, 4


class MlpBlock(nn.Module):
    """A residual block with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ScaledBlock(nn.Module):
    """A residual block with a trained 0-d factor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class NormedBlock(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.fc(x)))


class ConvBlock(nn.Module):
    """A residual convolution with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, DIM), nn.Conv2d(DIM, DIM, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.conv(self.norm(x)))


class MixedBlock(nn.Module):
    """A residual block of experts: all weighted by a router, and one chosen per sample or position."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 3)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        found = torch.stack([torch.tanh(expert(x)) for expert in self.experts], -2)
        chosen = F.one_hot(weights.argmax(-1), 3).to(x.dtype)
        return x + ((weights + 0.5 * chosen * weights).unsqueeze(-1) * found).sum(-2)


class AttentionBlock(nn.Module):
    """A transformer's block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.num_heads = 4

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, DIM // self.num_heads)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GruBlock(nn.Module):
    """A residual GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(x)[0]


class LstmBlock(nn.Module):
    """A residual LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, DIM, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class DroppingBlock(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(DIM, 2 * DIM), nn.Dropout(0.2), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(x))))


class ConditionedBlock(nn.Module):
    """A residual block with an optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.condition, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, c: Tensor | None = None) -> Tensor:
        hidden = self.up(x)
        if c is not None:
            hidden = hidden + self.condition(c)
        return x + self.down(F.silu(hidden))


class Mlp(nn.Module):
    """A stem, residual blocks, a norm and a head, on vectors."""

    def __init__(self, block: type[nn.Module] = MlpBlock) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, CLASSES)
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvNet(nn.Module):
    """Convolutions on vectors that are read as images of 4 x 4."""

    def __init__(self, block: type[nn.Module] = ConvBlock) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, DIM, 3, padding=1), nn.Linear(DIM, CLASSES)
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.unflatten(-1, (1, 4, 4)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((-2, -1)))


class Sequence(nn.Module):
    """An embedding with positions, blocks, a norm and a head, on token ids."""

    def __init__(self, block: type[nn.Module] = AttentionBlock) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TiedLanguageModel(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, block: type[nn.Module] = AttentionBlock) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Conditioned(nn.Module):
    """Blocks that also get the stem's output."""

    def __init__(self, block: type[nn.Module] = ConditionedBlock) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, CLASSES)
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = c = self.stem(x)
        for block in self.blocks:
            x = block(x, c)
        return self.head(x)


class TwoNames(Sequence):
    """An embedding that has two names."""

    def __init__(self, block: type[nn.Module] = AttentionBlock) -> None:
        super().__init__(block)
        self.tokens = self.wte


class Encoder(nn.Module):
    """PyTorch's own encoder layers on token ids."""

    def __init__(self, block: type[nn.Module] = nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(block(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True) for _ in range(DEPTH))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
