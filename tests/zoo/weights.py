"""Weights and gradients in users' code: penalties, norms, hooks, writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.zoo.base import CLASSES, DIM, Classifier, Penalised, Stack, net, stack, total, vectors
from tests.zoo.cells import Row


class Kept(Penalised):
    """A penalty on a list of weights made in ``__init__``."""

    def __init__(self) -> None:
        super().__init__(lambda module, _: l2(module.kept))
        self.kept = [p for p in self.net.parameters() if p.ndim > 1]


def l1(parameters: Iterable[Tensor]) -> Tensor:
    return 1e-3 * total(p.abs().sum() for p in parameters)


def l2(parameters: Iterable[Tensor]) -> Tensor:
    return 1e-2 * total(p.square().sum() for p in parameters)


def orthogonality(module: Any, _: Tensor) -> Tensor:
    weights = [block.fc1.weight for block in module.net.blocks]
    return 1e-2 * total((w.mT @ w - torch.eye(w.shape[1], device=w.device)).square().mean() for w in weights)


def smoothness(module: Any, _: Tensor) -> Tensor:
    """Neighbouring blocks' weights are to be alike."""
    return 1e-2 * total((a.fc1.weight - b.fc1.weight).square().sum() for a, b in pairwise(module.net.blocks))


def norms(module: Any, _: Tensor) -> Tensor:
    return 1e-2 * total(p.norm() for name, p in module.named_parameters() if name.endswith("weight"))


def singular_values(module: Any, _: Tensor) -> Tensor:
    return 1e-2 * total(torch.linalg.svdvals(block.fc2.weight)[0] for block in module.net.blocks)


class TransposedWeight(nn.Module):
    """A block with a weight that is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(32, DIM).t())
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(x @ self.weight + self.bias) @ self.weight.t()


class NoElements(Stack):
    """A parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.none.sum()


class TiedByData(Stack):
    """Two parameters in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(DIM, DIM, bias=False)
        self.again.weight.data = self.stem.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.again(x))


class TwoViews(Stack):
    """Two parameters side by side in one storage."""

    def __init__(self) -> None:
        super().__init__()
        first, second = 0.2 * torch.randn(2, DIM, DIM)
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.stem(x) @ self.first) @ self.second)


class Ewc(Penalised):
    """Elastic weight consolidation: a distance to old weights, kept as buffers."""

    def __init__(self) -> None:
        super().__init__(lambda module, _: l2(module.changes()))
        for name, p in list(self.net.named_parameters()):
            self.register_buffer("old_" + name.replace(".", "_"), p.detach().clone() + 0.1)

    def changes(self) -> list[Tensor]:
        old = dict(self.named_buffers())
        return [p - old["old_" + name.replace(".", "_")] for name, p in self.net.named_parameters()]


class ClipsByHand(Classifier):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class ClipsBlocks(Classifier):
    """A limit for each block's gradient."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for block in self.net.blocks:
            nn.utils.clip_grad_norm_(block.parameters(), 0.05)


class ClipsByValue(Classifier):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 0.01)


class AdaptiveClipping(Classifier):
    """Gradients by the size of their weights (NFNets)."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                limit = 0.05 * p.detach().norm().clamp_min(1e-3)
                p.grad.mul_((limit / p.grad.norm().clamp_min(1e-6)).clamp_max(1.0))


class LogsNorms(Classifier):
    """As in Lightning's documentation."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class LogsNormOfBlock(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.net.blocks[0], norm_type=2))


class LogsTotalNorm(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm())


class LogsWeights(Classifier):
    """Statistics of each weight after a step."""

    def on_train_batch_end(self, *args: Any) -> None:
        for name, p in self.named_parameters():
            self.log(f"mean/{name}", p.detach().mean())
            self.log(f"largest/{name}", p.detach().abs().max())


class LogsWeightNorm(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("weights", torch.stack([p.detach().norm() for p in self.parameters()]).norm())
        return loss


class CountsParameters(Classifier):
    """Scales the loss by the number of parameters."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * 1000 / sum(p.numel() for p in self.parameters())


class HalvesGradients(Classifier):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class ZeroesGradients(Classifier):
    """The first block's gradients are set to zero."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.net.blocks[0].parameters():
            p.grad = None


class Hooked(Classifier):
    """``register_hook`` on the head's weight, or on one of each block."""

    def __init__(self, change: Callable[[Tensor], Tensor], of_head: bool = False) -> None:
        super().__init__()
        layers = [self.net.head] if of_head else [block.fc1 for block in self.net.blocks]
        for layer in layers:
            layer.weight.register_hook(change)


def damped(grad: Tensor) -> Tensor:
    return grad * 0.1


def normalized(grad: Tensor) -> Tensor:
    """Needs the whole gradient."""
    return 0.1 * grad / (grad.norm() + 1e-2)


class HooksMask(Classifier):
    """Keeps some rows as they are, as when new words are learned beside old ones."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(CLASSES, 1)
        mask[:2] = 0
        self.net.head.weight.register_hook(lambda grad: grad * mask.to(grad.device))


class HooksAfter(Classifier):
    """``register_post_accumulate_grad_hook``."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.net.blocks.parameters():
            p.register_post_accumulate_grad_hook(self.limit)

    @staticmethod
    def limit(p: Tensor) -> None:
        p.grad.mul_(0.1)  # type: ignore[union-attr]


class MomentumEncoder(Classifier):
    """A slow copy of the network, updated in ``training_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Stack().requires_grad_(False)
        self.teacher.load_state_dict(self.net.state_dict())

    @torch.no_grad()
    def update(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.mul_(0.5).add_(fast, alpha=0.5)

    def distilled(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0]).softmax(-1)
        loss = self.loss(batch) + F.cross_entropy(self(batch[0]), target)
        self.log("loss", loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.update()
        return self.distilled(batch)


class MomentumAfter(MomentumEncoder):
    """The same, updated in ``on_train_batch_end``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.distilled(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.update()


class MomentumInHook(MomentumAfter):
    """A target for one pass of the network, updated where parameters are whole."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0])
        logits = self(batch[0])
        return F.cross_entropy(logits, batch[1]) + F.mse_loss(logits, target)


class MomentumByData(MomentumEncoder):
    """Through ``.data``, as older code does."""

    def update(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data = slow.data * 0.5 + fast.data * 0.5


class Clamped(Classifier):
    """WGAN's limits on weights, after each step."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.1, 0.1)


class ClampedFirst(Classifier):
    """The same at the start of ``training_step``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for p in self.parameters():
            p.data.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


class UnitRows(Classifier):
    """Rows of the head have norm 1 after each step."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.net.head.weight.copy_(F.normalize(self.net.head.weight, dim=1))


class UnitRowsOfBlocks(Classifier):
    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for block in self.net.blocks:
                block.fc1.weight.copy_(F.normalize(block.fc1.weight, dim=1))


class ResetsHead(Classifier):
    """Gives the head new weights in the middle of training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                self.net.head.weight.fill_(0.1)
                self.net.head.bias.zero_()


class ShrinksAfterEpoch(Classifier):
    """In place, and in a hook that no step has."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.9)


class ReplacesBeforeEpoch(Classifier):
    """By other memory."""

    def on_train_epoch_start(self) -> None:
        for p in self.net.blocks.parameters():
            p.data = p.data * 0.9


class ResetsBlock(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                for p in self.net.blocks[2].parameters():
                    p.mul_(0.5)


class InitialisesOnStart(Classifier):
    """Sets weights when training starts."""

    def on_fit_start(self) -> None:
        with torch.no_grad():
            for p in self.net.blocks.parameters():
                p.mul_(0.5)


class ShrinksInStart(Classifier):
    """Sets weights in ``on_train_start``, after they were split."""

    def on_train_start(self) -> None:
        with torch.no_grad():
            self.net.head.weight.mul_(0.5)
            self.net.blocks[3].fc2.weight.mul_(0.5)


class ReadsShape(Classifier):
    """Uses the shape of a weight."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) / self.net.blocks[0].fc1.weight.shape[0]


class Pruned(Classifier):
    """Masks of torch's pruning."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.prune.l1_unstructured(self.net.head, "weight", 0.3)


class ProximalStep(Classifier):
    """Soft thresholds after the optimizer's step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        with torch.no_grad():
            for p in self.net.blocks.parameters():
                p.copy_(p.sign() * (p.abs() - 1e-3).clamp_min(0))


class GradientNoise(Classifier):
    """Adds to gradients what depends on the shape of a parameter."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.add_(1e-2 * torch.arange(p.numel(), device=p.device).view_as(p).cos())


class GradientPenalty(Classifier):
    """The norm of the gradient by the input, differentiated twice."""

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        out = self(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + 0.01 * grad.square().sum(-1).mean()


def penalised(name: str, term: Callable[[Any, Tensor], Tensor], **options: Any) -> Row:
    return Row(name, partial(Penalised, term), vectors, **{"either": "zero3, tensor", **options})


SPLITS = "zero1, zero2, zero3, tensor, pipeline"
ROWS = [
    penalised(
        "L2 of all",
        lambda m, _: l2(m.parameters()),
        equal="ddp, zero1, zero2",
        either="zero3, tensor, pipeline, pipeline x shard",
    ),
    penalised("L1 of all", lambda m, _: l1(m.parameters())),
    penalised("L1 of blocks", lambda m, _: l1(m.net.blocks.parameters()), either="zero3, tensor, pipeline"),
    Row("L2 of a kept list", Kept, vectors, equal="ddp", either="zero2, zero3, tensor, pipeline"),
    Row("a transposed weight", stack(TransposedWeight), vectors, either=SPLITS),
    Row("a weight without elements", net(NoElements), vectors, either=SPLITS),
    Row("tied by data", net(TiedByData), vectors, either=f"ddp, {SPLITS}"),
    Row("views of one storage", net(TwoViews), vectors, equal=SPLITS),
    penalised("L2 of the head", lambda m, _: l2([m.net.head.weight])),
    penalised("norms of weights", norms, either="zero3, tensor, pipeline"),
    penalised("orthogonality", orthogonality),
    penalised("largest singular values", singular_values, either="zero3, tensor, pipeline"),
    penalised("neighbours alike", smoothness),
    Row("distance to old weights", Ewc, vectors, either="zero3, tensor, pipeline"),
    penalised(
        "penalty of all, flat", lambda m, _: 1e-2 * torch.cat([p.flatten() for p in m.net.parameters()]).square().mean()
    ),
    Row("clips by hand", ClipsByHand, vectors, either="zero3, tensor, pipeline"),
    Row("clips blocks", ClipsBlocks, vectors, either="zero3, tensor"),
    Row("clips by value", ClipsByValue, vectors, either="zero3, tensor, pipeline"),
    Row("adaptive clipping", AdaptiveClipping, vectors, either="zero3, tensor"),
    Row("logs grad_norm", LogsNorms, vectors, either="zero3, tensor, pipeline"),
    Row("logs grad_norm of a block", LogsNormOfBlock, vectors, either="zero3, tensor"),
    Row("logs the norm of all gradients", LogsTotalNorm, vectors, either="zero3, tensor, pipeline"),
    Row("logs statistics of weights", LogsWeights, vectors, either="tensor, pipeline"),
    Row("logs the norm of weights", LogsWeightNorm, vectors, either="zero3, tensor, pipeline"),
    Row("counts parameters", CountsParameters, vectors, either="tensor, pipeline"),
    Row("halves gradients", HalvesGradients, vectors, equal="zero3, tensor, pipeline"),
    Row("drops gradients", ZeroesGradients, vectors, either="zero1, zero2"),
    Row("hook on the head's weight", partial(Hooked, damped, True), vectors, either="zero3, tensor, pipeline"),
    Row("hooks on blocks' weights", partial(Hooked, damped), vectors, either="zero3, tensor"),
    Row("hooks that normalize", partial(Hooked, normalized), vectors, either="tensor"),
    Row("hooks that mask", HooksMask, vectors, either="zero3, tensor"),
    Row("hooks after accumulation", HooksAfter, vectors, either="zero3, tensor, pipeline"),
    Row("momentum encoder", MomentumEncoder, vectors, either="zero3, pipeline"),
    Row("momentum after the step", MomentumAfter, vectors, either="zero3, tensor, pipeline"),
    Row("momentum in a hook", MomentumInHook, vectors, equal="zero3, tensor, pipeline"),
    Row("momentum by data", MomentumByData, vectors, either="zero3, pipeline"),
    Row("clamps weights", Clamped, vectors, either="zero3, tensor, pipeline"),
    Row("clamps weights first", ClampedFirst, vectors, either="zero3, pipeline"),
    Row("unit rows of the head", UnitRows, vectors, either="zero3, tensor, pipeline"),
    Row("unit rows of blocks", UnitRowsOfBlocks, vectors, either="zero3, pipeline"),
    Row("resets the head", ResetsHead, vectors, either="zero3, tensor, pipeline"),
    Row("shrinks a block", ResetsBlock, vectors, either="zero3, tensor"),
    Row("shrinks weights after an epoch", ShrinksAfterEpoch, vectors, steps=8, equal="zero3, tensor, pipeline"),
    Row("replaces weights before an epoch", ReplacesBeforeEpoch, vectors, steps=8, equal="zero2, zero3, tensor"),
    Row("sets weights at the start of fit", InitialisesOnStart, vectors, either="zero3, tensor, pipeline"),
    Row("sets weights at the start of training", ShrinksInStart, vectors, either="zero3, pipeline"),
    Row("the shape of a weight", ReadsShape, vectors, either="zero3, tensor, pipeline"),
    Row("torch's pruning", Pruned, vectors, either="zero3, tensor"),
    Row(
        "ModelPruning",
        Classifier,
        vectors,
        trainer=lambda: {"callbacks": [ModelPruning("l1_unstructured", amount=0.3)]},
        steps=8,
        either="ddp, zero2, zero3, tensor, pipeline",
    ),
    Row("proximal steps", ProximalStep, vectors, either="zero3, tensor"),
    Row("noise on gradients", GradientNoise, vectors, either="zero2, zero3, tensor"),
    Row("gradient penalty", GradientPenalty, vectors, either="zero3, pipeline"),
]
# Hooks of parameters run before gradients are averaged.
ROWS = [row if row.name == "hooks that normalize" else row.also_on("servers") for row in ROWS]
