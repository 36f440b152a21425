"""Modules written for plain Lightning and one device, and their data.

The sizes are odd on purpose: rows do not divide evenly by 2 or 4 ranks, and some tensors have fewer rows than ranks.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY = 23
LENGTH = 6
SAMPLES = 48


class Tokens(Dataset):
    """``samples`` fixed random sequences: ``{"index": (), "tokens": (LENGTH + 1,)}``."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index), "tokens": self.tokens[index]}


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim + 1), nn.SiLU(), nn.Linear(2 * dim + 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A small Llama-like decoder: tokens ``(batch, length)`` to logits ``(batch, length, VOCABULARY)``."""

    def __init__(self, dim: int = 18, heads: int = 3, blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.temperature = nn.Parameter(torch.tensor(0.5))  # a scalar cannot be split
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.temperature


class NextToken(pl.LightningModule):
    """Losses and predictions of a language model of batches ``{"tokens": (batch, length)}``."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["tokens"][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["tokens"]))

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["tokens"][:, :-1]).argmax(-1)


class LanguageModel(NextToken):
    """Next-token prediction with the optimizer named: ``sgd`` with momentum shows a wrong scale, ``adamw`` hides it."""

    def __init__(self, optimizer: str = "sgd", tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.decoder = Decoder(tied=tied)
        if frozen:
            self.decoder.embedding.requires_grad_(False)
            self.decoder.blocks[0].attention.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


class Plain(pl.LightningModule):
    """No repeated blocks, a BatchNorm-free net with a parameter of one row and one of none beyond a scalar."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.embedding = nn.Embedding(VOCABULARY, 7)
        self.hidden = nn.Linear(7, 5)
        self.out = nn.Linear(5, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = torch.tanh(self.hidden(self.embedding(batch["tokens"]).mean(1)))
        return F.mse_loss(self.out(x).squeeze(-1), batch["tokens"].float().mean(1) / VOCABULARY)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


# Name -> (class, arguments).
MODULES: dict[str, tuple[type[pl.LightningModule], dict[str, object]]] = {
    "decoder-sgd": (LanguageModel, {"optimizer": "sgd"}),
    "decoder-adamw": (LanguageModel, {"optimizer": "adamw"}),
    "tied-sgd": (LanguageModel, {"optimizer": "sgd", "tied": True}),
    "frozen-sgd": (LanguageModel, {"optimizer": "sgd", "frozen": True}),
    "plain-sgd": (Plain, {"optimizer": "sgd"}),
}


def make_module(name: str) -> pl.LightningModule:
    """Return the module called ``name``, with the same weights each time."""
    cls, arguments = MODULES[name]
    torch.manual_seed(11)
    return cls(**arguments)
