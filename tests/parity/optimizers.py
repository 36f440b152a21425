"""Optimizers of torch and of users (some are the zoo's), elementwise and not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.zoo.optimizers import Centralized, GlobalNorm, Lamb, Lars, NewtonSchulz, Sam


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
    "orthogonal": lambda p: NewtonSchulz(p, lr=0.2),
    "lars": lambda p: Lars(_two_groups(p), lr=0.5),
    "lamb": lambda p: Lamb(_two_groups(p), lr=0.2),
    "centralized": lambda p: Centralized(p, lr=0.1),
    "norm of all": lambda p: GlobalNorm(p),
    "sam": lambda p: Sam(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p),
    "keeps a list": lambda p: KeepsList(p, lr=0.1),
    "noisy": lambda p: Noisy(p, lr=0.1),
    "sparse adam": lambda p: torch.optim.SparseAdam(list(p)),
}
