"""Building blocks of the zoo: data of a few shapes, networks with blocks, a module around a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, DIM, CLASSES, LENGTH, VOCABULARY = 24, 16, 4, 8, 24
# The first sample of the third batch, which differs from the others.
LATER = 16
IGNORED = -100


class Samples(Dataset):
    """Samples that are rows of tensors, collated as tuples or as a dictionary.

    From :data:`LATER` on they are shorter or padded: texts and sequences have half the length, and a dictionary's
    ``labels`` end with one that does not count; of vectors and pictures, the end is 0.

    Attributes:
        varies: whether they are.
    """

    varies = True

    def __init__(self, *tensors: Tensor, **named: Tensor) -> None:
        self.tensors, self.named = tensors, named

    def __len__(self) -> int:
        return len(next(iter((*self.tensors, *self.named.values()))))

    def __getitem__(self, index: int) -> Any:
        if self.named:
            return {name: self._row(tensor, index, name) for name, tensor in self.named.items()}
        rows = tuple(self._row(tensor, index) for tensor in self.tensors)
        return rows if len(rows) > 1 else rows[0]

    def _row(self, tensor: Tensor, index: int, name: str = "") -> Tensor:
        row = tensor[index]
        if not self.varies or index < LATER or row.ndim == 0:
            return row
        if row.ndim == 2 or not row.is_floating_point():
            row = row[: -(-len(row) // 2)].clone()
            if name == "labels":
                row[-1] = IGNORED
            return row
        kept = torch.arange(row.shape[-1]) < -(-row.shape[-1] // 2)
        return row * kept


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _labels(*shape: int, classes: int = CLASSES) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(12))


def loader(batch: int, *tensors: Tensor, **named: Tensor) -> DataLoader:
    """A loader of these samples, in order."""
    return DataLoader(Samples(*tensors, **named), batch_size=batch)


def alike(make: Callable[[int], DataLoader]) -> Callable[[int], DataLoader]:
    """Data whose later batches do not differ from the first, for modules that take one shape only."""

    def make_alike(batch: int) -> DataLoader:
        made = make(batch)
        made.dataset.varies = False
        return made

    return make_alike


def vectors(batch: int) -> DataLoader:
    """``(x: (B, 16), y: (B,))``."""
    return loader(batch, torch.randn(SAMPLES, DIM, generator=_random()), _labels(SAMPLES))


def validated(batch: int) -> tuple[DataLoader, DataLoader]:
    """``vectors`` to train on and to validate on."""
    return vectors(batch), vectors(batch)


def images(batch: int) -> DataLoader:
    """``(x: (B, 3, 8, 8), y: (B,))``."""
    return loader(batch, torch.randn(SAMPLES, 3, 8, 8, generator=_random()), _labels(SAMPLES))


def tokens(batch: int) -> DataLoader:
    """``tokens: (B, 9)`` as the only tensor."""
    return loader(batch, _labels(SAMPLES, LENGTH + 1, classes=VOCABULARY))


def texts(batch: int) -> DataLoader:
    """``{"input_ids": (B, 8), "labels": (B, 8)}``."""
    ids = _labels(SAMPLES, LENGTH, classes=VOCABULARY)
    return loader(batch, input_ids=ids, labels=ids)


def sequences(batch: int) -> DataLoader:
    """``(x: (B, 8, 16), y: (B, 8))``: features and a class per position."""
    return loader(batch, torch.randn(SAMPLES, LENGTH, DIM, generator=_random()), _labels(SAMPLES, LENGTH))


def noisy(batch: int) -> DataLoader:
    """``(x: (B, 16), noise: (B, 16), t: (B, 1))``, for models that draw: the draw is part of the sample."""
    x = torch.randn(SAMPLES, 2 * DIM + 1, generator=_random())
    return loader(batch, x[:, :DIM], x[:, DIM:-1], x[:, -1:].sigmoid())


# ---- Networks -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block of an MLP."""

    def __init__(self, dim: int = DIM, hidden: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Attention(nn.Module):
    """Attention with separate projections."""

    def __init__(self, dim: int = DIM, heads: int = 4, causal: bool = True) -> None:
        super().__init__()
        self.num_heads, self.causal = heads, causal
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, x.shape[-1] // self.num_heads)).transpose(1, 2)

    def heads(self, x: Tensor) -> Tensor:
        return self.attend(*(self.split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj)))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.heads(x).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Layer(nn.Module):
    """A transformer's block out of two parts."""

    def __init__(self, attention: Callable[[], nn.Module] = Attention, mlp: Callable[[], nn.Module] | None = None):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(DIM), attention(), nn.LayerNorm(DIM)
        self.mlp = mlp() if mlp else Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Mlp(nn.Module):
    """The feed-forward layer of a transformer; variants override ``between`` or give that function."""

    def __init__(self, dim: int = DIM, hidden: int = 32, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        if between is not None:
            self.between = between  # type: ignore[method-assign]

    def between(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.between(self.fc1(x)))


class Blocks(nn.Module):
    """Equal blocks, run one after the other; variants override ``run``."""

    blocks: nn.ModuleList

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Stack(Blocks):
    """A stem, equal blocks, a head."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 4, stem: nn.Module | None = None):
        super().__init__()
        self.stem = stem if stem is not None else nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.run(self.stem(x)))


class Gpt(Blocks):
    """Embeddings with positions, equal blocks, a head over the vocabulary."""

    def __init__(self, block: Callable[[], nn.Module] = Layer, depth: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.norm(self.run(self.embed(ids))))


# ---- Modules --------------------------------------------------------------------------------------------------------


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum: an update is as wrong as its gradient."""
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW with an epsilon that keeps rounding from growing into steps."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)


class Classifier(pl.LightningModule):
    """A network that classifies vectors, images or positions; variants override what they are about."""

    network: Callable[[], nn.Module] = Stack
    optimizer: Callable[[nn.Module], Any] = staticmethod(sgd)

    def __init__(self, network: Callable[[], nn.Module] | None = None, optimizer: Callable[..., Any] | None = None):
        super().__init__()
        self.net = (network or type(self).network)()
        self.make_optimizer = optimizer or type(self).optimizer

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        assert x.device == self.device
        return F.cross_entropy(self(x).flatten(0, -2), y.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


class Penalised(Classifier):
    """A term of the loss that is computed from weights: ``term(module, x)``."""

    def __init__(self, term: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.term = term

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.term(self, batch[0])


def step_by_hand(module: pl.LightningModule, loss: Tensor) -> None:
    """Step all optimizers of a module with manual optimization."""
    found: Any = module.optimizers()
    optimizers = found if isinstance(found, list) else [found]
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(loss)
    for optimizer in optimizers:
        optimizer.step()


class LanguageModel(Classifier):
    """Next-token prediction on ``tokens``."""

    network = Gpt

    def loss(self, batch: Tensor) -> Tensor:
        assert batch.device == self.device
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def net(network: Callable[[], nn.Module]) -> Callable[[], Classifier]:
    """A classifier around a network."""
    return partial(Classifier, network)


def stepped(optimizer: Callable[[nn.Module], Any]) -> Callable[[], Classifier]:
    """A stack with these optimizers."""
    return partial(Classifier, optimizer=optimizer)


def stack(block: Callable[[], nn.Module]) -> Callable[[], Classifier]:
    """Equal blocks on vectors or positions."""
    return net(partial(Stack, block))


def text(network: Callable[[], nn.Module]) -> Callable[[], LanguageModel]:
    """A language model around a network."""
    return partial(LanguageModel, network)


def gpt(block: Callable[[], nn.Module]) -> Callable[[], LanguageModel]:
    """A GPT of these blocks."""
    return text(partial(Gpt, block))


def mlp(make: Callable[[], nn.Module]) -> Callable[[], LanguageModel]:
    """A GPT with this feed-forward layer."""
    return gpt(partial(Layer, mlp=make))


class Computes(Classifier):
    """A model of transformers that computes its own loss on ``texts``."""

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.net(**batch).loss
        return loss


def total(values: Iterable[Tensor]) -> Tensor:
    """Sum of tensors of any number."""
    return torch.stack(list(values)).sum()
