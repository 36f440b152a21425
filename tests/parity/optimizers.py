"""Optimizers of torch and of users, elementwise and not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Lars(Optimizer):
    """SGD with momentum, scaled by the ratio of two norms (arXiv:1708.03888)."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, trust: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.dim() > 1:
                    ratio = group["trust"] * p.norm() / (update.norm() + 1e-9)
                    update = update * torch.where(ratio > 0, ratio, torch.ones_like(ratio))
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(update, alpha=group["lr"])
                p.sub_(momentum)
        return loss


class Lamb(Optimizer):
    """Adam with a trust ratio for each weight (arXiv:1904.00962); the step is counted in the group."""

    def __init__(self, params: Any, lr: float = 0.02, most: float | None = None) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6, "most": most})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            found = [p for p in group["params"] if p.grad is not None]
            scale: Any = 1.0
            if group["most"] is not None:
                norm = torch.stack([p.grad.norm() for p in found]).norm()
                scale = (group["most"] / norm).clamp(max=1.0)
            for p in found:
                self._step(p, p.grad * scale, group)
        return loss

    def _step(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
        state["mean"].lerp_(gradient, 1 - beta1)
        state["square"].lerp_(gradient.square(), 1 - beta2)
        square = state["square"] / (1 - beta2 ** group["step"])
        update = state["mean"] / (1 - beta1 ** group["step"]) / (square.sqrt() + group["eps"])
        p.sub_(update * (p.norm() / (update.norm() + 1e-9)).clamp(0.01, 10) * group["lr"])


class Orthogonal(Optimizer):
    """As Muon (Newton-Schulz on momentum), in the precision of the weights; other weights by their sign."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["momentum"] = 0.9 * state.get("momentum", 0.0) + p.grad
                update = _orthogonal(state["momentum"]) if p.dim() == 2 else state["momentum"]
                p.sub_(update * max(1, p.shape[0] / p[0].numel()) ** 0.5, alpha=group["lr"])
        return loss


def _orthogonal(x: Tensor) -> Tensor:
    x = x / (x.norm() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


class Centralized(torch.optim.SGD):
    """SGD on gradients less their mean over all but the first dim (arXiv:2004.01461)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None and p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))
        super().step()
        return loss


class Sam(Optimizer):
    """Steps with the gradient at the worst point near by (arXiv:2010.01412), for which it computes the loss twice."""

    def __init__(self, params: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        again = torch.enable_grad()(closure)
        loss = again()
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        moves = [p.grad * 0.05 / norm for p in found]
        torch._foreach_add_(found, moves)
        again()
        torch._foreach_sub_(found, moves)
        self.base.step()
        return loss


class KeepsList(torch.optim.SGD):
    """Keeps its own list of parameters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.mine = [p for group in self.param_groups for p in group["params"]]


class Noisy(torch.optim.SGD):
    """Adds random numbers to weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(torch.randn_like(p), alpha=1e-3)
        return loss


def _matrices(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.dim() == 2]


def _two_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    found = list(parameters)
    return [{"params": _matrices(found)}, {"params": [p for p in found if p.dim() != 2], "lr": 0.01}]


# By name, from the parameters of a module. The learning rates let three steps change what a gradient is.
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "muon": lambda p: torch.optim.Muon(_matrices(p), lr=0.02),
    "adafactor": lambda p: torch.optim.Adafactor(_two_groups(p), lr=0.02),
    "orthogonal": lambda p: Orthogonal(p),
    "lars": lambda p: Lars(_two_groups(p)),
    "lamb": lambda p: Lamb(_two_groups(p)),
    "centralized": lambda p: Centralized(p, lr=0.1, momentum=0.9),
    "lamb of all": lambda p: Lamb(p, most=0.1),
    "sam": lambda p: Sam(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p),
    "keeps a list": lambda p: KeepsList(p, lr=0.1),
    "noisy": lambda p: Noisy(p, lr=0.1),
    "sparse adam": lambda p: torch.optim.SparseAdam(list(p)),
}
