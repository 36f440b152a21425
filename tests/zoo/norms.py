"""Norms, statistics of a batch, counters and buffers that a step changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from tests.zoo.base import CLASSES, DIM, Block, Classifier, Layer, Stack, gpt, net, stack, tokens, vectors
from tests.zoo.cells import Row

SCALE = torch.full((DIM,), 0.1)


class BatchNormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)  # type: ignore[assignment]


class FrozenStatistics(Classifier):
    """Batch norms that stay in evaluation, as in detectors."""

    network = staticmethod(lambda: Stack(BatchNormBlock))

    def on_train_batch_start(self, *args: Any) -> None:
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()


class StemNorm(Classifier):
    """One batch norm, before the blocks."""

    network = staticmethod(lambda: Stack(stem=nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))))


class HeadNorm(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(DIM), nn.Linear(DIM, CLASSES))  # type: ignore[assignment]


class RenormBlock(Block):
    """Running statistics by hand, used for the pass they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.running = 0.9 * self.running + 0.1 * x.detach().flatten(0, -2).mean(0)
        return super().forward(x - self.running)


class Parametrized(Block):
    """``change`` of some of its layers."""

    def __init__(self, change: Callable[[nn.Module], Any], *layers: str) -> None:
        super().__init__()
        for layer in layers:
            change(getattr(self, layer))


class WeightStandardized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, weight / weight.std(1, keepdim=True).clamp_min(1e-3), self.bias)


class StandardizedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = WeightStandardized(DIM, 32), WeightStandardized(32, DIM)


class ScaledBlock(Block):
    """A trained scale of what a block adds: timm's layer scale, or one number that is zero at first (ReZero)."""

    def __init__(self, gamma: Tensor) -> None:
        super().__init__()
        self.gamma = nn.Parameter(gamma.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.fc2(F.gelu(self.fc1(self.norm(x))))


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(SCALE.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x.mul(self.gamma)


class ScaledLayer(Layer):
    """Layer scales after attention and the feed-forward layer, as in CaiT and DINOv2."""

    def __init__(self) -> None:
        super().__init__()
        self.ls1, self.ls2 = LayerScale(), LayerScale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PostNorm(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class Sandwich(Layer):
    """Norms before and after, as in Gemma 2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm3, self.norm4 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm3(self.attn(self.norm1(x)))
        return x + self.norm4(self.mlp(self.norm2(x)))


class Parallel(Layer):
    """Attention and feed-forward side by side, from one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2 = nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        return x + self.attn(normed) + self.mlp(normed)


class UnitBlock(Layer):
    """nGPT: states on a sphere, moved by trained rates."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.full((DIM,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(x + self.rate * (F.normalize(self.attn(x), dim=-1) - x), dim=-1)
        return F.normalize(x + self.rate * (F.normalize(self.mlp(x), dim=-1) - x), dim=-1)


class CountsCalls(Classifier):
    """A counter that scales the loss, advanced by each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        loss = self.loss(batch) / self.calls
        self.log("loss", loss)
        return loss


class CountsInPython(CountsCalls):
    """The same as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        del self.calls
        self.calls = 0


class CountsInForward(Block):
    """Each block counts its calls and warms up by them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + (super().forward(x) - x) * (1 - 0.5**self.seen)


class CountsSamples(Classifier):
    """Adds up what it saw; a sum over micro-batches is that over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.samples += len(batch[0])
        return super().training_step(batch, batch_idx)


class RunningLoss(Classifier):
    """Divides by a running mean of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean = 0.5 * self.mean + 0.5 * loss.detach()
        return loss / self.mean


class Queue(Classifier):
    """MoCo's queue of keys, moved on by each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        loss = F.cross_entropy(out, batch[1]) + 0.1 * (out @ self.queue.mT).square().mean()
        self.queue = torch.cat((out.detach(), self.queue))[:16]
        return loss


class BatchStatistic(Classifier):
    """A loss that is no mean over samples: the spread within a batch (VICReg)."""

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        return F.cross_entropy(out, batch[1]) + F.relu(1 - out.std(0)).mean()


class SumOverBatch(Classifier):
    """A sum over samples instead of a mean."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")


class Contrastive(Classifier):
    """Each sample against all others of the batch."""

    def loss(self, batch: Any) -> Tensor:
        z = F.normalize(self(batch[0]), dim=-1)
        same = (batch[1][:, None] == batch[1]).float()
        return F.mse_loss(z @ z.mT, same)


class ByStep(Classifier):
    """A weight that depends on ``global_step`` and on ``batch_idx``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * (1 + self.global_step) / (2 + batch_idx)
        self.log("loss", loss)
        return loss


def changed(change: Callable[[nn.Module], Any], *layers: str) -> Callable[[], Classifier]:
    """Blocks with ``change`` of some of their layers."""
    return stack(partial(Parametrized, change, *layers))


class ActivationNorm(Block):
    """Sets its weights from the first batch (Glow)."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale, self.is_set = nn.Parameter(torch.zeros(DIM)), nn.Parameter(torch.ones(DIM)), False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.is_set:
            self.shift.data, self.scale.data, self.is_set = -x.detach().mean(0), 1 / x.detach().std(0), True
        return super().forward((x + self.shift) * self.scale)


ROWS = [
    Row("activation norm", stack(ActivationNorm), vectors, either="ddp, zero2, pipeline, servers", late=True),
    Row("BatchNorm in blocks", stack(BatchNormBlock), vectors, either="tensor, pipeline, interleaved"),
    Row("BatchNorm in evaluation", FrozenStatistics, vectors, equal="tensor, pipeline"),
    Row("BatchNorm before the blocks", StemNorm, vectors, either="tensor, pipeline"),
    Row("BatchNorm after the blocks", net(HeadNorm), vectors, either="tensor, pipeline"),
    Row("running mean by hand", stack(RenormBlock), vectors, either="tensor, pipeline"),
    Row("spectral norm", changed(spectral_norm, "fc1"), vectors, either="tensor, pipeline"),
    Row("spectral norm, old", changed(nn.utils.spectral_norm, "fc1"), vectors, either="tensor, pipeline"),
    Row("weight norm", changed(weight_norm, "fc1", "fc2"), vectors, equal="pipeline", either="tensor"),
    Row("weight norm, old", changed(nn.utils.weight_norm, "fc1"), vectors, equal="pipeline", either="tensor"),
    Row("orthogonal weights", changed(orthogonal, "fc1"), vectors, either="tensor, pipeline"),
    Row("standardized weights", stack(StandardizedBlock), vectors, equal="tensor, pipeline"),
    Row("layer scale in a block", stack(partial(ScaledBlock, SCALE)), vectors, equal="tensor, pipeline"),
    Row("layer scale modules", gpt(ScaledLayer), tokens, equal="tensor, pipeline"),
    Row("norm after", gpt(PostNorm), tokens, equal="tensor, pipeline"),
    Row("norms around", gpt(Sandwich), tokens, equal="tensor, pipeline"),
    Row("attention beside MLP", gpt(Parallel), tokens, equal="tensor, pipeline"),
    Row("states on a sphere", gpt(UnitBlock), tokens, equal="tensor, pipeline"),
    Row("ReZero", stack(partial(ScaledBlock, torch.zeros(()))), vectors, equal="tensor, pipeline"),
    Row("counts steps", CountsCalls, vectors, equal="tensor", either="pipeline"),
    Row("counts steps in Python", CountsInPython, vectors, equal="tensor", either="pipeline"),
    Row("blocks count calls", stack(CountsInForward), vectors, equal="tensor", either="pipeline"),
    Row("counts samples", CountsSamples, vectors, equal="tensor", either="pipeline"),
    Row("running mean of the loss", RunningLoss, vectors, equal="tensor", either="pipeline"),
    Row("queue of keys", Queue, vectors, equal="tensor", either="pipeline"),
    Row("spread within a batch", BatchStatistic, vectors, equal="tensor", either="pipeline"),
    Row("a sum over samples", SumOverBatch, vectors, equal="tensor", either="pipeline"),
    Row("samples against each other", Contrastive, vectors, equal="tensor", either="pipeline"),
    Row("loss by step", ByStep, vectors, equal="tensor, pipeline"),
]
