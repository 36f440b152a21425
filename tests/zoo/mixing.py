"""Blocks that mix positions, which ranks that split a sequence must not do for themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.zoo.base import (
    DIM,
    LENGTH,
    SAMPLES,
    VOCABULARY,
    Attention,
    Classifier,
    Gpt,
    LanguageModel,
    Layer,
    Samples,
    _labels,
    alike,
    gpt,
    tokens,
)
from tests.zoo.cells import Row


class Mixes(Layer):
    """Mixes positions before attention; variants override ``mix`` or give that function."""

    def __init__(self, mix: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.change = mix

    def mix(self, x: Tensor) -> Tensor:
        return self.change(x)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mix(x))


class Convolution(Mixes):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        return x + self.conv(x.mT).mT


class CausalConvolution(Mixes):
    """Depthwise, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, groups=DIM)

    def mix(self, x: Tensor) -> Tensor:
        return x + self.conv(F.pad(x.mT, (2, 0))).mT


class Recurrent(Mixes):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def mix(self, x: Tensor) -> Tensor:
        return x + self.gru(x)[0]


class Positions(Mixes):
    """A parameter for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Parameter(0.1 * torch.randn(LENGTH, DIM))

    def mix(self, x: Tensor) -> Tensor:
        return x + self.where[: x.shape[1]]


class Mixer(nn.Module):
    """MLP-Mixer's block: a matrix over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tokens = nn.LayerNorm(DIM), nn.Linear(LENGTH, LENGTH)
        self.fc1, self.fc2 = nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).mT).mT
        return x + self.fc2(F.gelu(self.fc1(x)))


class Fourier(nn.Module):
    """FNet's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + torch.fft.fft2(x).real / LENGTH)
        return x + self.fc2(F.gelu(self.fc1(x)))


class Scan(nn.Module):
    """A diagonal state space, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.decay = nn.LayerNorm(DIM), nn.Parameter(torch.linspace(-1, 1, DIM))
        self.in_proj, self.out_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        inputs, state, out = self.in_proj(self.norm(x)), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = self.decay.sigmoid() * state + inputs[:, t]
            out.append(state)
        return x + self.out_proj(torch.stack(out, 1))


class TimeFirst(Attention):
    """Attention for ``(time, batch, width)``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class TimeFirstGpt(Gpt):
    def embed(self, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[0], device=ids.device))[:, None]


class TimeFirstModel(LanguageModel):
    """Batches are ``(time, batch)``."""

    network = staticmethod(lambda: TimeFirstGpt(lambda: Layer(TimeFirst)))

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:-1]).flatten(0, 1), batch[1:].flatten())


class TimeFirstInside(LanguageModel):
    """Batches are ``(batch, time)``; the module transposes them."""

    network = staticmethod(lambda: TimeFirstGpt(lambda: Layer(TimeFirst)))

    def loss(self, batch: Tensor) -> Tensor:
        ids = batch.t()
        return F.cross_entropy(self(ids[:-1]).flatten(0, 1), ids[1:].flatten())


class TimeFirstLstm(Classifier):
    """A recurrent network on ``(time, batch)``, as in torch's examples."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.LSTM(DIM, DIM, 2))
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)

    def loss(self, batch: Tensor) -> Tensor:
        out, _ = self.net(self.embedding(batch[:-1]))
        return F.cross_entropy(self.head(out).flatten(0, 1), batch[1:].flatten())


class Pooled(LanguageModel):
    """Classifies the whole sequence by its mean after the blocks."""

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.net.norm(self.net.run(self.net.embed(batch[:, :-1])))
        return F.cross_entropy(self.net.head(hidden.mean(1)), batch[:, -1])


class LastPosition(Pooled):
    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1])[:, -1], batch[:, -1])


class ClassToken(Gpt):
    """A trained token before all others: nine positions."""

    def __init__(self) -> None:
        super().__init__(lambda: Layer(lambda: Attention(causal=False)))
        self.cls = nn.Parameter(torch.randn(1, 1, DIM))

    def embed(self, ids: Tensor) -> Tensor:
        x = super().embed(ids[:, :7])
        return torch.cat((self.cls.expand(len(x), -1, -1), x), 1)


class ClassTokenModel(LanguageModel):
    network = ClassToken

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch)[:, 0], batch[:, -1])


def time_first(batch: int) -> DataLoader[Any]:
    """``tokens: (9, B)``."""
    ids = _labels(SAMPLES, LENGTH + 1, classes=VOCABULARY)
    return DataLoader(Samples(ids), batch_size=batch, collate_fn=lambda rows: torch.stack(rows, 1))


def mixed(name: str, mix: Callable[[Tensor], Tensor], **options: Any) -> Row:
    """A row whose blocks apply ``mix`` first."""
    return Row(name, gpt(partial(Mixes, mix)), tokens, **{"either": SPLIT, **options})


SPLIT = "context, sequence"
ROWS = [
    # RWKV's.
    mixed(
        "token shift",
        lambda x: x + 0.5 * F.pad(x, (0, 0, 1, -1)),
        equal="tensor, pipeline",
        either=f"{SPLIT}, gather, ulysses",
    ),
    mixed("roll", lambda x: x + 0.5 * x.roll(1, 1)),
    mixed("cumulative sum", lambda x: x + x.cumsum(1) / LENGTH),
    mixed("mean", lambda x: x + x.mean(1, keepdim=True)),
    mixed("largest", lambda x: x + x.amax(1, keepdim=True)),
    mixed("norm over positions", lambda x: (x - x.mean(1, keepdim=True)) / (1 + x.std(1, keepdim=True))),
    mixed("flip", lambda x: x + 0.3 * x.flip(1)),
    mixed("first token", lambda x: x + 0.5 * x[:, :1]),
    mixed("last token", lambda x: x + 0.5 * x[:, -1:]),
    mixed("weights by position", lambda x: x * (1 + torch.arange(x.shape[1], device=x.device)[:, None] / LENGTH)),
    mixed("number of positions", lambda x: x * x.shape[1] / LENGTH),
    Row("convolution", gpt(Convolution), tokens, either=SPLIT),
    Row("causal convolution", gpt(CausalConvolution), tokens, either=SPLIT),
    Row("GRU", gpt(Recurrent), tokens, either=SPLIT),
    Row("parameters by position", gpt(Positions), tokens, either=SPLIT),
    Row("MLP-Mixer", gpt(Mixer), alike(tokens), either="sequence, context"),
    Row("FNet", gpt(Fourier), tokens, either=SPLIT),
    Row("state space", gpt(Scan), tokens, either="tensor, sequence"),
    Row("time first", TimeFirstModel, time_first, either="pipeline, context"),
    Row("time first inside", TimeFirstInside, tokens, either=SPLIT),
    Row("LSTM, time first", TimeFirstLstm, time_first, equal="ddp, zero3"),
    Row("mean of the sequence", Pooled, tokens, either=SPLIT),
    Row("last position", LastPosition, tokens, either=SPLIT),
    Row("class token", ClassTokenModel, tokens, either=SPLIT),
]
