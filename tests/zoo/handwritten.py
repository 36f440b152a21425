"""Parameters, gradients and optimizers that users' code keeps, changes or steps itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MaxMetric

from tests.zoo.base import DIM, Classifier, LanguageModel, Penalised, tokens, total, validated, vectors
from tests.zoo.cells import Row

DATA = "ddp, zero1, zero2, zero3"
ALL = f"{DATA}, tensor, tensor x shard"


class Keeps(Penalised):
    """A penalised module that has kept its parameters, and old values of them."""

    def __init__(self, term: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(term)
        self.kept = dict(self.net.named_parameters())
        self.old = {name: 0.9 * p.detach().clone() for name, p in self.kept.items()}


def elastic(module: Any, _: Tensor) -> Tensor:
    """The distance of kept parameters to their old values."""
    return 1e-2 * total((p - module.old[name].to(p)).square().sum() for name, p in module.kept.items())


def on_data(module: Any, x: Tensor) -> Tensor:
    first, second = module.net.blocks[:2]
    hidden = F.linear(x, first.fc1.weight, first.fc1.bias).square().mean()
    return 0.1 * (hidden + (x @ second.fc2.weight).square().mean())


def by_index(module: Any, _: Tensor) -> Tensor:
    return 0.1 * total(
        b.fc1.weight[:3, 1].sum() + b.fc2.weight[0].norm() + b.fc1.bias[::2].std() for b in module.net.blocks
    )


def in_pairs(module: Any, _: Tensor) -> Tensor:
    one, other = (block.fc1.weight for block in module.net.blocks[:2])
    return (one - other).square().mean() + 0.1 * (F.normalize(one, dim=1) @ F.normalize(other, dim=1).T).square().mean()


def later(module: Any, x: Tensor) -> Tensor | float:
    return elastic(module, x) if module.global_step else 0.0


class Manual(Classifier):
    """Manual optimization, with ``change(module, parameters)`` of gradients before a step."""

    def __init__(self, change: Callable[[Any, list[nn.Parameter]], Any] = lambda *_: None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.change = change
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.seen += 1
        loss = self.loss(self.changed(batch))
        self.log("loss", loss)
        self.differentiate(loss)
        self.change(self, list(self.parameters()))
        optimizer.step()
        return loss

    def changed(self, batch: Any) -> Any:
        return batch

    def differentiate(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Adversarial(Manual):
    """Inputs moved along their gradient, which is computed first."""

    def changed(self, batch: Any) -> Any:
        x = batch[0].clone().requires_grad_()
        self.loss((x, batch[1])).backward()
        self.zero_grad()
        return x.detach() + 0.1 * x.grad.sign(), batch[1]


class Assigned(Manual):
    """Gradients by ``torch.autograd.grad``."""

    def differentiate(self, loss: Tensor) -> None:
        parameters = list(self.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient


def scale_all(_: Any, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad *= 0.1


def scale_head(module: Any, _: Any) -> None:
    for p in module.net.head.parameters():
        if p.grad is not None:
            p.grad.data.mul_(0.1)


def clip_by_method(module: Any, _: Any) -> None:
    module.clip_gradients(module.optimizers(), gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class Hooked(Classifier):
    """``change(module)`` after each step."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change
        self.best = MaxMetric()
        self.kept = list(self.net.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        self.change(self)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


class Adaptive(Classifier):
    """Gradients clipped by the norms of weights, which are read first."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            size = p.detach().norm().clamp(min=1e-3)
            if p.grad is not None:
                p.grad.mul_((0.05 * size / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))


class AddsGroup(Classifier):
    """The head joins the optimizer after two steps."""

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_step == 2:
            self.optimizers().optimizer.add_param_group({"params": list(self.net.head.parameters()), "lr": 0.02})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.blocks.parameters(), lr=0.1)


class CallsParts(LanguageModel):
    """The step calls the parts of its network, not the network."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.net.embed(batch[:, :-1])
        for block in self.net.blocks:
            x = block(x)
        return F.cross_entropy(self.net.head(self.net.norm(x)).flatten(0, 1), batch[:, 1:].flatten())


def swap(module: Any) -> None:
    for p in (module.net.head.weight, module.net.blocks[0].fc1.weight):
        before = p.data
        p.data = torch.zeros_like(p)
        p.data = before


def shrink(module: Any) -> None:
    for p in module.net.parameters():
        p.data = 0.9 * p.data


@torch.no_grad()
def clamp_kept(module: Any) -> None:
    for p in module.kept:
        p.clamp_(-0.3, 0.3)


@torch.no_grad()
def shrink_in_place(module: Any) -> None:
    module.net.head.weight *= 0.9
    module.net.blocks[1].fc1.weight -= 0.01


def measure(module: Any) -> None:
    module.best(torch.tensor(1.0))
    module.log("best", module.best.compute())


class MomentumByData(Classifier):
    """A target network that the optimizer has, too, and the step overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(DIM, DIM)

    def loss(self, batch: Any) -> Tensor:
        for p, online in zip(self.target.parameters(), self.net.stem.parameters(), strict=True):
            p.data = 0.7 * p.data + 0.3 * online.data
        return super().loss((batch[0] + 0.1 * self.target(batch[0]), batch[1]))


class RatesByShape(LanguageModel):
    """Learning rates by fan-in (maximal update parametrization)."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "lr": 0.5 / p.shape[-1] * (1 + (p.numel() > 400))} for p in self.parameters()]
        return torch.optim.SGD(groups, lr=0.1)


class BeforeZeroGrad(LanguageModel):
    """An average of a weight that the step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.mean += 1

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * (1 + 0.1 * self.mean)


class LogsOnOneRank(Classifier):
    """A value that rank 0 logs."""

    def loss(self, batch: Any) -> Tensor:
        if self.trainer.is_global_zero:
            self.log("once", 1.0, rank_zero_only=True)
        return super().loss(batch)


class NormInValidation(Classifier):
    """Weights read in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("norm", torch.stack([p.norm() for p in self.parameters()]).norm())


def _penalised(name: str, term: Callable[[Any, Tensor], Any], **options: Any) -> Row:
    options = {"equal": "zero1, zero3, tensor, tensor x shard", **options}
    return Row(name, partial(Keeps, term), vectors, **options)


def _manual(name: str, change: Callable[[Any, list[nn.Parameter]], Any], **options: Any) -> Row:
    return Row(name, partial(Manual, change), vectors, **{"equal": ALL, **options})


def _hooked(name: str, change: Callable[[Any], Any], **options: Any) -> Row:
    return Row(name, partial(Hooked, change), vectors, **{"equal": f"{ALL}, pipeline", **options})


ROWS = [
    _penalised("distance of kept parameters", elastic, either="pipeline"),
    _penalised("weights on data", on_data),
    _penalised("rows and columns of weights", by_index),
    _penalised("pairs of weights", in_pairs),
    _penalised(
        "spectral norms", lambda m, _: 0.1 * total(torch.linalg.matrix_norm(b.fc1.weight, 2) for b in m.net.blocks)
    ),
    _penalised("a penalty from the second step on", later),
    _penalised("penalty, accumulation", elastic, trainer=lambda: {"accumulate_grad_batches": 2}),
    _penalised("penalty, clipping", elastic, trainer=lambda: {"gradient_clip_val": 0.1}),
    _penalised("penalty, offloaded", elastic, equal="zero3", options={"zero3": {"offload": "parameters"}}),
    _penalised("penalty, recomputation", elastic, options={"zero3": {"activation_checkpointing": "full"}}),
    _manual("a buffer that a manual step counts", lambda *_: None),
    _manual("clipped by hand", lambda _, parameters: nn.utils.clip_grad_norm_(parameters, 0.05)),
    _manual("clipped by value by hand", lambda _, parameters: nn.utils.clip_grad_value_(parameters, 0.01)),
    _manual("clipped by the module's method", clip_by_method),
    _manual("gradients scaled by hand", scale_all),
    _manual("gradients of the head scaled", scale_head),
    Row("adaptive clipping", Adaptive, vectors, equal=f"{ALL}, pipeline"),
    Row("added group", AddsGroup, vectors, equal=f"{ALL}, pipeline", steps=5),
    Row("parts called by the step", CallsParts, tokens, equal=f"{ALL}, context, pipeline", either="sequence"),
    Row("adversarial inputs", Adversarial, vectors, equal=ALL),
    Row("assigned gradients", Assigned, vectors, either=ALL),
    _hooked("weights swapped and restored", swap),
    _hooked("weights replaced by data", shrink),
    _hooked("kept weights clamped", clamp_kept, equal=ALL),
    _hooked("weights multiplied in place", shrink_in_place),
    _hooked("a new state of the optimizer", lambda m: setattr(m.trainer.optimizers[0], "state", defaultdict(dict))),
    _hooked("a cleared state of the optimizer", lambda m: m.trainer.optimizers[0].state.clear()),
    _hooked("a metric called in a hook", measure),
    Row("a trained target by data", MomentumByData, vectors, equal="ddp, zero1, zero2, tensor", either="zero3"),
    Row("rates by shape", RatesByShape, tokens, equal=f"{ALL}, sequence, pipeline, pipeline x tensor"),
    Row("on_before_zero_grad", BeforeZeroGrad, tokens, equal="zero3, tensor, pipeline, interleaved"),
    Row("logged on one rank", LogsOnOneRank, vectors, equal="zero2, zero3"),
    Row(
        "norm of weights in validation",
        NormInValidation,
        validated,
        equal="zero1, zero3, tensor, tensor x shard",
        trainer=lambda: {"val_check_interval": 1, "check_val_every_n_epoch": None, "limit_val_batches": 1},
        synced=("norm",),
    ),
]
