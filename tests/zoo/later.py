"""What begins in a later step: layers and losses that compute something else from the third step on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.base import Attention, Gpt, LanguageModel, Layer, Mlp, step_by_hand, tokens, total
from tests.zoo.cells import Row

SPLITS = "tensor, sequence, context, ulysses, pipeline"


class Changing(Mlp):
    """``change`` of its input or of its hidden units once it is on."""

    def __init__(self, change: Callable[[Tensor], Tensor], of_input: bool) -> None:
        super().__init__()
        self.change, self.of_input, self.is_on = change, of_input, False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on and self.of_input:
            x = self.change(x)
        hidden = F.gelu(self.fc1(x))
        self.kept = hidden
        return self.fc2(self.change(hidden) if self.is_on and not self.of_input else hidden)


class ByHand(Attention):
    """Attention by two products once it is on."""

    is_on = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.is_on:
            return super().attend(q, k, v)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


class Later(LanguageModel):
    """Parts that are switched on, and ``term(module, ids)`` of the loss."""

    def __init__(self, make_block: Callable[[], nn.Module] = Layer, term: Callable[..., Any] | None = None) -> None:
        super().__init__(partial(Gpt, make_block))
        self.term = term

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_late = self.global_step >= 2
        for part in self.modules():
            if isinstance(part, Changing | ByHand):
                part.is_on = is_late
        loss = self.loss(batch)
        return loss + self.term(self, batch) if self.term is not None and is_late else loss


class ManualLater(LanguageModel):
    """Manual optimization from the third step on."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.automatic_optimization = self.global_step < 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            step_by_hand(self, loss)
        return loss


def mlp(change: Callable[[Tensor], Tensor], of_input: bool = False) -> Callable[[], nn.Module]:
    return partial(Layer, Attention, partial(Changing, change, of_input))


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def mix_positions(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def activity(module: Any, _: Tensor) -> Tensor:
    return total(block.mlp.kept.abs().mean() for block in module.net.blocks)


def early_exit(module: Any, ids: Tensor) -> Tensor:
    net = module.net
    hidden = net.blocks[0](net.embed(ids[:, :-1]))
    return F.cross_entropy(net.head(hidden[:, -1]), ids[:, -1])


def gradient_penalty(module: Any, ids: Tensor) -> Tensor:
    x = module.net.embed(ids[:, :-1])
    (slope,) = torch.autograd.grad(module.net.head(module.net.norm(x)).logsumexp(-1).sum(), x, create_graph=True)
    return 0.1 * slope.square().mean()


def _late(name: str, make_block: Callable[[], nn.Module], term: Any = None, **options: Any) -> Row:
    options = {"either": SPLITS, **options}
    return Row(name, partial(Later, make_block, term), tokens, steps=6, late=True, **options)


ROWS = [
    _late("hidden softmax", mlp(softmax)),
    _late("mean over positions", mlp(mix_positions, of_input=True), equal="zero3, pipeline", either="context"),
    _late("attention by hand", partial(Layer, ByHand), equal="tensor, pipeline", either="context, ulysses"),
    _late("hidden penalty", mlp(softmax), activity, equal="zero1, zero3", either="tensor, context, pipeline"),
    _late("early exit", Layer, early_exit, equal="zero3, tensor", either="context, sequence, pipeline"),
    Row("manual steps", ManualLater, tokens, equal="zero3, tensor", either="pipeline", steps=6, late=True),
    _late("a gradient penalty", Layer, gradient_penalty, equal="zero1", either="zero3, tensor", tolerance=2e-4),
]
