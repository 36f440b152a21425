"""Steps of an unmodified optimizer on other tensors than those it holds.

Between steps an optimizer holds what checkpoints, clipping and callbacks see: parameters split over ranks, with state
split alike. During a step its groups hold

- local parts as plain tensors, for parameters with element-wise updates: dispatching every operation through DTensor
  takes longer than the arithmetic of a small parameter,
- whole parameters that this rank owns, with whole gradients (``owners``), for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.data.optimizers.owners import Owners
from trainwright.strategies.state.shards import spread_like


class _Part:
    """Split parameter, and the plain tensor that replaces this rank's part of it during a step."""

    __slots__ = ("held", "local", "shown", "stand_in")

    def __init__(self, held: DTensor) -> None:
        self.held = held
        self.local: Tensor | None = None
        self.shown: dict[str, Any] = {}
        self.stand_in = nn.Parameter(held._local_tensor.detach(), requires_grad=held.requires_grad)

    def enter(self, state: dict[Any, Any]) -> None:
        """Move gradient and state to the stand-in."""
        held, stand_in, local, gradient = self.held, self.stand_in, self.held._local_tensor, self.held.grad
        if local is not self.local:
            self.local, stand_in.data = local, local.detach()
        stand_in.grad = None if gradient is None else _part_like(gradient, held)
        values = state.pop(held, None)
        if values is not None:
            self.shown = values
            state[stand_in] = {k: v._local_tensor if isinstance(v, DTensor) else v for k, v in values.items()}

    def leave(self, state: dict[Any, Any]) -> None:
        """Move the state back to the parameter; unchanged values stay the same objects."""
        stand_in, shown = self.stand_in, self.shown
        stand_in.grad = None
        values = state.pop(stand_in, None)
        if values is None:
            return
        for key, value in values.items():
            old = shown.get(key)
            if old is not value and not (isinstance(old, DTensor) and old._local_tensor is value):
                is_like = isinstance(value, Tensor) and value.dim() > 0 and value.shape == stand_in.shape
                shown[key] = spread_like(self.held, value) if is_like else value
        for key in shown.keys() - values.keys():
            del shown[key]
        state[self.held], self.shown = shown, {}


class _Whole:
    """Parameter that one rank steps whole, and its stand-in there."""

    __slots__ = ("held", "name", "stand_in")

    def __init__(self, held: Tensor, name: str) -> None:
        self.held, self.name = held, name
        self.stand_in = nn.Parameter(local_tensor(held).new_empty(0), requires_grad=held.requires_grad)

    def enter(self, state: dict[Any, Any], whole: Tensor, gradient: Tensor) -> None:
        """Move values, gradient and state to the stand-in."""
        self.stand_in.data = whole
        self.stand_in.grad = gradient
        if self.held in state:
            state[self.stand_in] = state.pop(self.held)

    def leave(self, state: dict[Any, Any]) -> None:
        """Move the state back and free memory."""
        self.stand_in.grad = None
        self.stand_in.data = self.stand_in.new_empty(0)
        if self.stand_in in state:
            state[self.held] = state.pop(self.stand_in)


class PartSteps:
    """Swaps the parameters of one optimizer around each of its steps.

    The closure runs once, before the swap. No reference to the optimizer or strategy is kept, which would make the
    optimizer and its state outlive the run.

    Args:
        owners: of parameters that are stepped whole; ``None``: there are none.
    """

    def __init__(self, owners: Owners | None = None) -> None:
        self._owners = owners
        self._names: dict[Tensor, str] = {}
        self._here: Mapping[str, Tensor] = {}
        self._held: list[list[Tensor]] = []
        self._stand_ins: list[list[Tensor | _Whole]] = []
        self._parts: list[_Part] = []
        self._wholes: list[_Whole] = []
        self._depth = 0  # nested calls of an overridden `step`

    def know(self, names: Mapping[Tensor, str], wholes: Mapping[str, Tensor]) -> None:
        """Set the parameters.

        Args:
            names: of the tensors that the optimizer holds.
            wholes: by name, parameters that are whole on every rank beside the optimizer's part.
        """
        owners = self._owners
        self._names = {} if owners is None else {held: name for held, name in names.items() if name in owners}
        self._here = wholes
        self._held = []

    def attach(self, optimizer: Optimizer) -> None:
        """Swap parameters from the next step of ``optimizer`` on."""
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def restore(self, optimizer: Optimizer) -> None:
        """Restore the parameter groups of an optimizer whose step failed."""
        if self._depth:
            self._depth = 0
            self._leave(optimizer)

    # ---- around a step --------------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._depth:
            self._depth += 1
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: result}
        if not _same(self._held, optimizer.param_groups):
            self._take([list(group["params"]) for group in optimizer.param_groups])
        self._depth = 1
        self._enter(optimizer)
        return args, kwargs

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._give_back()
            self._leave(optimizer)

    def _take(self, held: list[list[Tensor]]) -> None:
        """Create the stand-ins."""
        parts: dict[Tensor, _Part] = {part.held: part for part in self._parts}
        wholes: dict[Tensor, _Whole] = {whole.held: whole for whole in self._wholes}
        for parameter in (p for group in held for p in group):
            if parameter in self._names:
                wholes.setdefault(parameter, _Whole(parameter, self._names[parameter]))
            elif isinstance(parameter, DTensor):
                parts.setdefault(parameter, _Part(parameter))
        self._held = held
        self._stand_ins = [
            [wholes[p] if p in wholes else parts[p].stand_in if p in parts else p for p in group] for group in held
        ]
        current = {p for group in held for p in group}
        self._parts = [part for p, part in parts.items() if p in current]
        self._wholes = [whole for p, whole in wholes.items() if p in current]

    def _enter(self, optimizer: Optimizer) -> None:
        state, owned = optimizer.state, self._fetch()
        for part in self._parts:
            part.enter(state)
        for whole, value, gradient in owned:
            whole.enter(state, value, gradient)
        mine = {whole for whole, _, _ in owned}
        for group, stand_ins in zip(optimizer.param_groups, self._stand_ins, strict=True):
            group["params"][:] = [
                each.stand_in if isinstance(each, _Whole) else each
                for each in stand_ins
                if not isinstance(each, _Whole) or each in mine
            ]

    def _leave(self, optimizer: Optimizer) -> None:
        for part in self._parts:
            part.leave(optimizer.state)
        for whole in self._wholes:
            whole.leave(optimizer.state)
        for group, held in zip(optimizer.param_groups, self._held, strict=True):
            group["params"][:] = held

    # ---- whole parameters -----------------------------------------------------------------------------------------

    def _fetch(self) -> list[tuple[_Whole, Tensor, Tensor]]:
        """Return parameters that this rank steps now, with values and gradients. A collective, if any is stepped
        whole.
        """
        stepped = {whole.name: whole for whole in self._wholes if whole.held.grad is not None}
        if self._owners is None or not stepped:
            return []
        gradients = self._owners.fetch({name: local_tensor(_grad(each.held)) for name, each in stepped.items()})
        elsewhere = {n: local_tensor(w.held).detach() for n, w in stepped.items() if n not in self._here}
        values = self._owners.fetch(elsewhere)
        return [
            (stepped[name], values[name] if name in values else self._here[name].detach(), gradient)
            for name, gradient in gradients.items()
        ]

    def _give_back(self) -> None:
        stepped = {whole.name: whole for whole in self._wholes if whole.held.grad is not None}
        if self._owners is None or not stepped:
            return
        values = {name: each.stand_in.data for name, each in stepped.items() if self._owners.is_mine(name)}
        self._owners.give_back({name: local_tensor(each.held).detach() for name, each in stepped.items()}, values)


def _same(held: list[list[Tensor]], groups: list[dict[str, Any]]) -> bool:
    """Return whether the groups hold the same parameters as before."""
    return len(held) == len(groups) and all(
        len(before) == len(group["params"]) and all(map(is_, before, group["params"]))
        for before, group in zip(held, groups, strict=True)
    )


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _part_like(gradient: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's part of a gradient, split as its parameter is."""
    if not isinstance(gradient, DTensor):
        return gradient
    if gradient._spec is not parameter._spec and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient._local_tensor
