"""Muon for the hidden matrices of a network, AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

OptimizerFactory = Callable[[Any], Optimizer]


class Muon(Optimizer):
    """Steps matrices by :class:`torch.optim.Muon`, and other parameters by :class:`torch.optim.AdamW`.

    Both have the same learning rate: Muon's updates are scaled to the root mean square of AdamW's (arXiv:2502.16982).

    Args:
        params: parameters, or groups of them. Matrices of a group with ``muon=False`` are AdamW's, such as embeddings
            and output layers (:func:`build_optimizer` finds them).
        lr: learning rate of both.
        weight_decay: decoupled weight decay of both; 0 is off.
        momentum: of Muon, 0 to 1, with Nesterov's step.
        betas, eps: of AdamW.

    Raises:
        ValueError: for values that torch's optimizers don't allow, or no parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
        none: list[dict[str, Any]] = [{"params": []}]
        self._adamw = AdamW(none, betas=betas, **shared)
        self._muon = torch.optim.Muon(none, momentum=momentum, adjust_lr_fn="match_rms_adamw", **shared)
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        super().__init__(
            _split(groups, lambda p: p.ndim != 2), {**self._adamw.defaults, **self._muon.defaults, "muon": True}
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients; return the closure's loss."""
        for stepped in (self._muon, self._adamw):
            # The state and the groups stay this optimizer's, which may have been loaded or replaced.
            groups = [group for group in self.param_groups if group["muon"] is (stepped is self._muon)]
            stepped.state, stepped.param_groups = self.state, groups
        loss = self._muon.step(closure)
        self._adamw.step()
        return loss


def build_optimizer(module: nn.Module, factory: OptimizerFactory, groups: list[dict[str, Any]]) -> Optimizer:
    """Build an optimizer; for :class:`Muon`, embeddings are AdamW's, and so is the output layer of a vocabulary.

    That is the last matrix of the module, if it has the shape of an embedding.

    Args:
        module: has the parameters.
        factory: takes parameter groups.
        groups: of the module's parameters.
    """
    if getattr(factory, "func", factory) is not Muon:
        return factory(groups)
    tables = [each.weight for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    last = [p for p in module.parameters() if p.ndim == 2][-1:]
    tables += [p for p in last if p.shape in [table.shape for table in tables]]
    known = set(tables)
    return factory(_split(groups, lambda parameter: parameter in known))


def _split(groups: Iterable[dict[str, Any]], is_adamw: Callable[[Tensor], bool]) -> list[dict[str, Any]]:
    """Divide groups into those of Muon and those of AdamW, of which groups with ``muon=False`` are whole."""
    found = []
    for group in groups:
        held: dict[bool, list[Tensor]] = {True: [], False: []}
        for parameter in group["params"]:
            held[group.get("muon", True) and not is_adamw(parameter)].append(parameter)
        found += [{**group, "params": params, "muon": is_muon} for is_muon, params in held.items() if params]
    return found
