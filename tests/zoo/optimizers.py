"""Optimizers: torch's own, and those that people write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.zoo.base import CLASSES, DIM, VOCABULARY, Classifier, sgd, step_by_hand, stepped, tokens, vectors
from tests.zoo.cells import Row


class Custom(Optimizer):
    """Updates each parameter by ``change``; variants override that."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self.change_all([p for p in group["params"] if p.grad is not None], group)
        return loss

    def change_all(self, parameters: list[Any], group: dict[str, Any]) -> None:
        for p in parameters:
            self.change(p, p.grad, self.state[p], group["lr"])

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        p.add_(grad, alpha=-lr)


class Lion(Custom):
    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        p.add_(torch.tanh(50 * (0.9 * momentum + 0.1 * grad)), alpha=-0.1 * lr)
        momentum.mul_(0.99).add_(grad, alpha=0.01)


class Lars(Custom):
    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        trust = p.norm() / (grad.norm() + 1e-3 * p.norm() + 1e-8)
        p.add_(grad * trust.clamp(0.01, 10), alpha=-0.1 * lr)


class LarsByItem(Custom):
    """Takes norms as Python numbers."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        weight, size = p.norm().item(), grad.norm().item()
        p.add_(grad, alpha=-0.1 * lr * (weight / (size + 1e-3) if weight > 0 else 1.0))


class Lamb(Custom):
    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["first"], state["second"] = torch.zeros_like(p), torch.zeros_like(p)
        state["first"].lerp_(grad, 0.1)
        state["second"].lerp_(grad * grad, 0.01)
        update = state["first"] / (state["second"].sqrt() + 1e-2)
        p.add_(update * (p.norm() / (update.norm() + 1e-3)).clamp_max(10), alpha=-0.1 * lr)


class Centralized(Custom):
    """Subtracts the mean of each row from its gradient."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        if grad.dim() > 1:
            grad = grad - grad.mean(tuple(range(1, grad.dim())), keepdim=True)
        p.add_(grad, alpha=-lr)


class NormedGradient(Custom):
    """Each gradient has norm 1."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        p.add_(grad / (grad.norm() + 1e-3), alpha=-0.1 * lr)


class RowWise(Custom):
    """One second moment for each row, as in row-wise Adagrad."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        moment = state.setdefault("moment", torch.zeros_like(p[:, :1] if p.dim() > 1 else p))
        moment.add_(grad.square().mean(1, keepdim=True) if p.dim() > 1 else grad.square())
        p.addcdiv_(grad, moment.sqrt() + 1e-2, value=-0.1 * lr)


class NewtonSchulz(Custom):
    """Muon as people copy it: orthogonal updates for matrices."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(grad)
        update = momentum
        if p.dim() == 2:
            update = momentum / (momentum.norm() + 1e-4)
            for _ in range(3):
                update = 1.5 * update - 0.5 * update @ update.mT @ update
        p.add_(update, alpha=-0.1 * lr)


class GlobalNorm(Custom):
    """Scales all updates by the norm of all gradients."""

    def change_all(self, parameters: list[Any], group: dict[str, Any]) -> None:
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.add_(p.grad / (1 + norm), alpha=-group["lr"])


class Sam(Custom):
    """Sharpness-aware: climbs, calls its closure again, steps from where it was."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        assert closure is not None
        loss, parameters = closure(), [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        with torch.no_grad():
            steps = [0.05 * p.grad / norm for p in parameters]
            for p, step in zip(parameters, steps, strict=True):
                p.add_(step)
        closure()
        with torch.no_grad():
            for p, step in zip(parameters, steps, strict=True):
                p.sub_(step).add_(p.grad, alpha=-self.param_groups[0]["lr"])
        return loss


class Lookahead(Custom):
    """Slow weights that follow every second step."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        slow = state.setdefault("slow", p.clone())
        state["steps"] = state.get("steps", 0) + 1
        p.add_(grad, alpha=-lr)
        if state["steps"] % 2 == 0:
            slow.lerp_(p, 0.5)
            p.copy_(slow)


class Noisy(Custom):
    """A cosine of the number of the element: depends on where an element is."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        where = torch.arange(p.numel(), dtype=p.dtype, device=p.device).view_as(p)
        p.add_(grad * (1 + 0.5 * where.cos()), alpha=-lr)


class Adafactored(Custom):
    """Second moments by rows and columns."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        square = grad.square() + 1e-6
        if p.dim() == 2:
            rows, columns = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
            square = rows * columns / rows.mean()
        p.add_(grad * square.rsqrt().clamp_max(100), alpha=-0.05 * lr)


def groups(module: nn.Module) -> Optimizer:
    """Weight decay for matrices alone, as in most GPT code."""
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    others = [p for p in module.parameters() if p.dim() < 2]
    decayed = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(decayed, lr=1e-2, eps=1e-4)


def by_place(module: nn.Module) -> Optimizer:
    """Groups of parameters by their place among all."""
    parameters = list(module.parameters())
    return torch.optim.SGD([{"params": parameters[::2], "lr": 0.1}, {"params": parameters[1::2]}], lr=0.01)


def muon(module: nn.Module) -> Optimizer:
    """torch's Muon for the blocks' matrices; it takes no others."""
    matrices = [p for p in module.parameters() if p.dim() == 2]
    return torch.optim.Muon(matrices, lr=0.01, weight_decay=0.0)


class MuonAndAdam(Classifier):
    """Muon for matrices, AdamW for the rest, both stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        rest = [p for p in self.parameters() if p.dim() != 2]
        return [muon(self), torch.optim.AdamW(rest, lr=1e-2, eps=1e-4)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step_by_hand(self, super().training_step(batch, batch_idx))


def warmed_up(module: nn.Module) -> Any:
    """A schedule by steps with a warm-up."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 3)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def one_cycle(module: nn.Module) -> Any:
    """A schedule that moves momentum, too."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class SparseEmbedding(pl.LightningModule):
    """Sparse gradients of a table, with torch's optimizer for them."""

    def __init__(self, optimizer: Callable[..., Optimizer] = torch.optim.SGD) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, DIM, sparse=True), nn.Linear(DIM, CLASSES)
        self.kind = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.table(batch[:, :-1]).mean(1)), batch[:, -1] % CLASSES)

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1)


class TwoSparse(SparseEmbedding):
    """SparseAdam for the table, SGD for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        step_by_hand(self, super().training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        table = torch.optim.SparseAdam(self.table.parameters(), lr=0.01, eps=1e-4)
        return [table, torch.optim.SGD(self.head.parameters(), lr=0.1)]


class Complex(pl.LightningModule):
    """Complex parameters, as in spectral layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.filter = nn.Parameter(torch.randn(DIM // 2 + 1, dtype=torch.complex64))
        self.head = nn.Linear(DIM, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = torch.fft.irfft(torch.fft.rfft(self.stem(x)) * self.filter, n=DIM)
        return F.cross_entropy(self.head(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Halves(Classifier):
    """Two optimizers for two halves, stepped in turn by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first = [*self.net.stem.parameters(), *self.net.blocks[:2].parameters()]
        second = [*self.net.blocks[2:].parameters(), *self.net.head.parameters()]
        return [torch.optim.SGD(first, lr=0.05), torch.optim.Adam(second, lr=0.01, eps=1e-4)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()[batch_idx % 2]
        self.toggle_optimizer(optimizer)
        loss = self.loss(batch)
        self.log("loss", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


def own(kind: Callable[..., Optimizer], **options: Any) -> Callable[[], Classifier]:
    """A stack stepped by this optimizer."""
    return stepped(lambda module: kind(module.parameters(), **options))


# torch's Muon iterates in bfloat16, which magnifies rounding: 1.4e-4 under ddp as well, and on one process gradients
# that are off by 1e-6 move weights by 2e-3.
IN_BF16 = 3e-4


class MadeEarly(Classifier):
    """The optimizer is made in ``__init__``."""

    def __init__(self, make: Callable[[nn.Module], Optimizer] = sgd) -> None:
        super().__init__()
        self.early = make(self)

    def configure_optimizers(self) -> Optimizer:
        return self.early


class GroupsById(Classifier):
    """Groups by ids collected in ``__init__``."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = {id(p) for p in self.net.head.parameters()}

    def configure_optimizers(self) -> Optimizer:
        of_head, others = (
            [p for p in self.parameters() if (id(p) in self.heads) is is_head] for is_head in (True, False)
        )
        return torch.optim.SGD([{"params": of_head, "lr": 0.1}, {"params": others, "lr": 0.01}])


class Prodigal(Custom):
    """Estimates its rate from all gradients, like Prodigy; the estimate shows in its group."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(d=1e-2, numerator=0.0)

    def change_all(self, parameters: list[Any], group: dict[str, Any]) -> None:
        size = 0.0
        for p in parameters:
            state = self.state[p]
            first = state.setdefault("first", p.clone())
            summed = state.setdefault("summed", torch.zeros_like(p)).add_(p.grad, alpha=group["d"])
            group["numerator"] += group["d"] * float((p.grad * (first - p)).sum())
            size += float(summed.abs().sum())
        group["d"] = max(group["d"], 2 * group["numerator"] / max(size, 1e-12))
        for p in parameters:
            p.add_(p.grad, alpha=-group["d"])


class Counting(Custom):
    """Counts its steps in its group."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["k"] = 0

    def change_all(self, parameters: list[Any], group: dict[str, Any]) -> None:
        group["k"] += 1
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] / group["k"])


class Replaced(Classifier):
    """Another optimizer from the start of training on."""

    def on_train_start(self) -> None:
        self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.01)]


class Forgetting(Classifier):
    """Scales the momentum down after a step (ReLoRA)."""

    def on_train_batch_end(self, *_: Any) -> None:
        for state in self.optimizers().optimizer.state.values():
            state["momentum_buffer"].mul_(0.1)


ROWS = [
    Row("replaced in a hook", Replaced, vectors, equal="ddp", either="zero2, tensor"),
    Row("state changed in a hook", Forgetting, vectors, equal="ddp", either="zero2, tensor", late=True),
    Row("SGD", own(torch.optim.SGD, lr=0.1), vectors, equal="ddp, zero1, zero2, zero3, tensor, pipeline"),
    Row(
        "SGD with Nesterov's momentum",
        own(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        vectors,
        equal="zero2, tensor",
    ),
    Row("Adam", own(torch.optim.Adam, lr=0.01, eps=1e-4), vectors, equal="zero2, tensor"),
    Row("AdamW, AMSGrad", own(torch.optim.AdamW, lr=0.01, eps=1e-4, amsgrad=True), vectors, equal="zero2, tensor"),
    Row("AdamW, fused", own(torch.optim.AdamW, lr=0.01, eps=1e-4, fused=True), vectors, equal="zero2, tensor"),
    Row("Adamax", own(torch.optim.Adamax, lr=0.01, eps=1e-3), vectors, equal="zero2, zero3"),
    Row("NAdam", own(torch.optim.NAdam, lr=0.01, eps=1e-4), vectors, equal="zero2, zero3"),
    Row("RAdam", own(torch.optim.RAdam, lr=0.01, eps=1e-4), vectors, equal="zero2, zero3"),
    Row("Adagrad", own(torch.optim.Adagrad, lr=0.05, eps=1e-3), vectors, equal="zero2, tensor"),
    Row("Adadelta", own(torch.optim.Adadelta, lr=0.5, eps=1e-4), vectors, equal="zero2, zero3"),
    Row("RMSprop", own(torch.optim.RMSprop, lr=0.01, eps=1e-3), vectors, equal="zero2, zero3"),
    Row("ASGD", own(torch.optim.ASGD, lr=0.05), vectors, equal="zero2, zero3"),
    Row("Rprop", own(torch.optim.Rprop, lr=0.01), vectors, equal="zero2, zero3"),
    Row("Adafactor", own(torch.optim.Adafactor, lr=0.05), vectors, equal="zero2, tensor"),
    Row("Muon", stepped(muon), vectors, equal="zero2, tensor", tolerance=IN_BF16),
    Row("Muon and AdamW", MuonAndAdam, vectors, equal="zero2, zero3", tolerance=IN_BF16),
    Row("Muon by hand", own(NewtonSchulz), vectors, equal="zero2, tensor"),
    Row("LARS", own(Lars), vectors, equal="zero2, tensor"),
    Row("LARS by numbers", own(LarsByItem), vectors, equal="zero2, tensor"),
    Row("LAMB", own(Lamb), vectors, equal="zero2, tensor"),
    Row("gradient centralization", own(Centralized), vectors, equal="zero2, tensor"),
    Row("gradients of norm 1", own(NormedGradient), vectors, equal="zero2, tensor"),
    Row("moments by row", own(RowWise), vectors, equal="zero2, tensor"),
    Row("moments by row and column", own(Adafactored), vectors, equal="zero2, tensor"),
    Row("norm of all gradients", own(GlobalNorm), vectors, either="tensor, pipeline"),
    Row("estimated rate", own(Prodigal), vectors, equal="ddp", either="zero1, zero3, tensor, pipeline"),
    Row("counting group", own(Counting), vectors, equal="zero1, zero3, pipeline"),
    Row("SAM", own(Sam), vectors, either="zero2, tensor"),
    Row("Lookahead", own(Lookahead), vectors, equal="zero2, tensor"),
    Row("Lion", own(Lion), vectors, equal="zero2, tensor"),
    Row("updates by place", own(Noisy), vectors, equal="zero2, tensor"),
    Row("element-wise, unknown", own(Custom), vectors, equal="zero2, tensor"),
    Row("L-BFGS", own(torch.optim.LBFGS, lr=0.1, max_iter=2, history_size=3), vectors, either="zero2, tensor"),
    Row("groups by shape", stepped(groups), vectors, equal="zero2, tensor"),
    Row("groups by place", stepped(by_place), vectors, equal="tensor, pipeline"),
    Row("warm-up by steps", stepped(warmed_up), vectors, equal="zero2, tensor"),
    Row("one cycle", stepped(one_cycle), vectors, equal="zero2, tensor"),
    Row("optimizers in turn", Halves, vectors, either="ddp, zero2"),
    Row("sparse gradients", SparseEmbedding, tokens, either="zero2, zero3"),
    Row("SparseAdam for a table", TwoSparse, tokens, either="zero2, zero3"),
    Row("complex parameters", Complex, vectors, either="zero2, zero3"),
    Row("made in __init__", MadeEarly, vectors, equal="ddp, zero2, zero3, tensor, pipeline, tensor x shard"),
    Row(
        "made in __init__, with a state",
        partial(MadeEarly, lambda module: torch.optim.Adagrad(module.parameters(), lr=0.05)),
        vectors,
        either="ddp, zero2, zero3, tensor, pipeline",
    ),
    Row("groups by id", GroupsById, vectors, either="ddp, zero1, zero2, zero3, tensor, pipeline"),
]
ROWS = [row.also_on("servers") for row in ROWS]
