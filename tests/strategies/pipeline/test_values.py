"""Values that leave a block other than as its output reach the stages that use them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.pipeline.models import (
    WIDTH,
    Model,
    build,
    engine_of,
    make_batch,
    plan_of,
    reference,
    train,
    worst_gradient,
)  # fmt: skip

Ranks = Callable[..., list[Any]]


class LongSkip(Model):
    """Outputs of early blocks are joined to inputs of late ones by layers between the blocks."""

    def __init__(self) -> None:
        super().__init__(4)
        self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def hidden(self, ids: Tensor) -> Tensor:
        x, held = self.embed(ids), []
        for index, layer in enumerate(self.layers):
            if index >= 2:
                x = self.joins[index - 2](torch.cat([x, held.pop()], -1))
            x = layer(x)
            if index < 2:
                held.append(x)
        return self.norm(x)


_SEEN: list[Tensor] = []


class Hooked(Model):
    """Hooks collect the outputs of blocks and of a part of each."""

    def __init__(self) -> None:
        super().__init__(4)
        for layer in self.layers:
            layer.register_forward_hook(lambda module, args, output: _SEEN.append(output * args[0]))
            layer.inner.register_forward_hook(lambda module, args, output: _SEEN.append(output.square()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _SEEN.clear()
        loss = super().training_step(batch, batch_idx)
        assert len(_SEEN) == 8
        return loss + sum(tensor.square().mean() for tensor in _SEEN)


class Uneven(Model):
    """A value computed from the first block's output is given to all others."""

    def hidden(self, ids: Tensor) -> Tensor:
        x, extra = self.embed(ids), None
        for index, layer in enumerate(self.layers):
            x = layer(x, extra)
            if index == 0:
                x, extra = x, x.mean(-1)
        return self.norm(x)


class Tied(Model):
    """The head uses the embedding's weight directly."""

    def logits(self, ids: Tensor) -> Tensor:
        return F.linear(self.hidden(ids), self.embed.weight) + self.head(self.hidden_of_none(ids))

    def hidden_of_none(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, WIDTH + 3)[..., :WIDTH].to(self.norm.weight.dtype)


class InPlace(Model):
    """Outputs of blocks are changed in place, at stage boundaries and elsewhere, and used again."""

    def hidden(self, ids: Tensor) -> Tensor:
        x, kept = self.embed(ids), []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
            x += 0.5
        return self.norm(x) + kept[0] * 0.1


class Decides(Model):
    """Python reads the value of an early output."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0:
                size = float(x.detach().abs().sum().item() > 0)
        return self.norm(x) * (1.0 + size)


MODELS: dict[str, Any] = {kind.__name__: kind for kind in (LongSkip, Hooked, Uneven, Tied, InPlace, Decides)}
FIRST = {"LongSkip": ("embed", "joins")}


def compared(name: str, schedule: str) -> tuple[float, float, float]:
    """Return the worst errors of losses, gradients and the evaluation loss on this rank."""
    kind = MODELS[name]
    batches = [make_batch(8, 6, 0), make_batch(7, 5, 1)]
    losses, gradients = reference(build(kind), *batches)
    model = build(kind)
    engine = engine_of(model, schedule, 4, plan_of(model, first=FIRST.get(name, ("embed",))))
    found = [train(engine, batch) for batch in batches]
    with torch.no_grad(), engine.evaluating():
        evaluated = [engine.relay(lambda: model.training_step(batches[0], 0), "step") for _ in range(2)]
    return (
        max(abs(float(a - b)) for a, b in zip(found, losses, strict=True)),
        worst_gradient(model, engine, gradients),
        max(abs(float(a - losses[0])) for a in evaluated),
    )


@pytest.mark.sample(5)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("name", [*MODELS])
def test_values_are_sent_to_the_stages_that_use_them(ranks: Ranks, name: str, schedule: str) -> None:
    for errors in ranks(compared, 2, name, schedule, timeout=60):
        assert max(errors) < 2e-6
