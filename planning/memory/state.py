"""Bytes of parameters, gradients and optimizer state on a rank.

They follow the rules of the strategies, like :mod:`trainwright.planning.layout_report`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, reduce
from operator import add
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule

from trainwright.planning.layout_report import OptimizerStates
from trainwright.planning.memory.share import StageShare
from trainwright.planning.model.facts import ModelFacts
from trainwright.planning.search.work import Work
from trainwright.strategies.compose.rules import cuts_module
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.plan.tensor_rules import plan_splits

FIRST, LAST, BOTH = "first", "last", "both"
Unit = int | str
"""A kind of block, or parameters outside of blocks: used before them, after them, or both (tied)."""


class UnitState(NamedTuple):
    """State bytes of a unit on a rank.

    Args:
        kept: parameters between steps.
        whole: parameters before ZeRO shards them.
        gradients: averaged.
        whole_gradients: before averaging and sharding.
        optimizer: state.
        stepped: parameters stepped by the optimizer.
        largest: largest whole parameter.
        reduced: whole gradients shared with other ranks of the state's axes.
    """

    kept: float = 0.0
    whole: float = 0.0
    gradients: float = 0.0
    whole_gradients: float = 0.0
    optimizer: float = 0.0
    stepped: float = 0.0
    largest: float = 0.0
    reduced: float = 0.0

    def plus(self, other: UnitState) -> UnitState:
        """Return the sum with another unit."""
        return UnitState(*map(add, self, other))._replace(largest=max(self.largest, other.largest))

    def times(self, count: float) -> UnitState:
        """Return the state of several equal units."""
        return UnitState(*(each * count for each in self))._replace(largest=self.largest) if count else UnitState()


def _sum(states: Iterable[UnitState]) -> UnitState:
    return reduce(UnitState.plus, states, UnitState())


class _Division(NamedTuple):
    """Division of parameters among ranks.

    Args:
        tensor, expert: sizes of these axes.
        ranks: sharing a copy of the state.
        stage: of ZeRO.
        splits: see :attr:`Work.splits_parameters`.
        alone: whether no other rank trains the same parameters, in a layout that cuts the module.
    """

    tensor: int
    expert: int
    ranks: int
    stage: int
    splits: bool
    alone: bool


@dataclass(frozen=True)
class _Weight:
    """A parameter; ``dim`` is split by the tensor axis, ``None``: not split."""

    shape: tuple[int, ...]
    itemsize: int
    is_trained: bool
    is_expert: bool
    dim: int | None
    dtype: torch.dtype
    name: str


class StateTable:
    """State bytes of a module's parameters, unit by unit.

    Args:
        facts: of the module.
        plans: returns the plan of ``small`` for a size of the tensor axis.
        small: the module with a few of its blocks, see :meth:`ModelFacts.reduced`.
        halves: whether floating-point weights become bf16 (``precision=bf16-true``).
    """

    def __init__(
        self, facts: ModelFacts, plans: Callable[[int], ModelPlan], small: LightningModule, halves: bool = False
    ) -> None:
        self.facts, self._plans, self._small, self._halves = facts, plans, small, halves
        self._states = OptimizerStates(facts.module)
        self._units = cache(self._sorted)
        self._linear = cache(self._linear_state)
        self._of_unit = cache(self._unit_state)
        self.of_share = cache(self._of_share)

    def _sorted(self, tensor: int) -> dict[Unit, list[_Weight]]:
        """Return the parameters of each unit for a size of the tensor axis."""
        module, blocks = self.facts.module, self.facts.blocks
        plan = self._plans(tensor)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        aliases = {alias: names[id(p)] for alias, p in module.named_parameters(remove_duplicate=False)}
        dims = {aliases[a]: split.dim for a, split in plan_splits(module, plan).items()} if tensor > 1 else {}
        sides = _sides(self._small, plan)
        seen: dict[int, str] = {}  # kind -> its representative block
        for name, kind in zip(blocks, self.facts.kinds, strict=True):
            seen.setdefault(kind, name)
        prefixes = {f"{name}.": kind for kind, name in seen.items()}
        others = tuple(f"{name}." for name in blocks if name not in seen.values())
        found: dict[Unit, list[_Weight]] = {}
        for name, parameter in module.named_parameters():
            if name.startswith(others):
                continue
            unit: Unit = next(
                (kind for prefix, kind in prefixes.items() if name.startswith(prefix)), sides.get(name, BOTH)
            )
            dtype = torch.bfloat16 if self._halves and parameter.is_floating_point() else parameter.dtype
            is_expert = any(name.startswith(f"{expert}.") for expert in plan.experts)
            weight = _Weight(
                tuple(parameter.shape), dtype.itemsize, parameter.requires_grad, is_expert, dims.get(name), dtype, name
            )
            found.setdefault(unit, []).append(weight)
        return found

    def _unit_state(self, unit: Unit, division: _Division) -> UnitState:
        """Return the bytes of a unit on the rank that holds most."""
        return _sum(self._parameter_state(each, division) for each in self._units(division.tensor).get(unit, ()))

    def _of_share(self, share: StageShare, division: _Division) -> tuple[UnitState, UnitState, UnitState]:
        """Return the sums of :func:`state_of`."""

        def each(unit: Unit) -> UnitState:
            return self._of_unit(unit, division)

        blocks = _sum(each(kind).times(count) for kind, count in share.blocks.items())
        heaviest = max((each(kind) for kind in share.blocks), key=lambda state: state.whole, default=UnitState())
        outside = [each(FIRST)] if share.has_first else []
        outside += [each(LAST)] if share.has_last else []
        outside += [each(BOTH)] if share.has_first or share.has_last else []
        return blocks, heaviest, _sum(outside)

    def _parameter_state(self, weight: _Weight, division: _Division) -> UnitState:
        shape, ranks = list(weight.shape), division.ranks
        if weight.dim is not None:
            shape[weight.dim] //= division.tensor
        if weight.is_expert and division.expert > 1:
            shape[0] //= division.expert
            ranks //= division.expert
        whole = math.prod(shape) * weight.itemsize
        chunk, mine = whole, math.prod(shape)
        if division.stage and shape and not (division.alone and ranks == 1 and not division.splits):
            rows = -(-shape[0] // ranks)
            chunk = rows * math.prod(shape[1:]) * weight.itemsize
            mine = min(rows, shape[0]) * math.prod(shape[1:])
        trained = 1 if weight.is_trained else 0
        return UnitState(
            kept=chunk if division.splits and shape else whole,
            whole=whole,
            gradients=trained * chunk,
            whole_gradients=trained * whole,
            optimizer=self._optimizer(weight, mine) if trained else 0.0,
            stepped=trained * mine * weight.itemsize,
            largest=whole,
            reduced=trained * whole if ranks > 1 or not weight.is_expert else 0.0,
        )

    def _optimizer(self, weight: _Weight, numel: int) -> float:
        """Return state bytes, linear in the number of elements, which is exact for elementwise optimizers."""
        constant, slope = self._linear(weight.name, weight.dtype)
        return constant + slope * numel

    def _linear_state(self, name: str, dtype: torch.dtype) -> tuple[float, float]:
        parameter = self.facts.module.get_parameter(name)
        small, large = (self._states.bytes_of(parameter, (rows, 8), dtype) for rows in (8, 16))
        if small is None or large is None:
            return 0.0, 8.0  # the optimizer is unknown: assume Adam's two numbers
        slope = (large - small) / 64
        return small - 64 * slope, slope


def _sides(module: LightningModule, plan: ModelPlan) -> dict[str, str]:
    """Return for each parameter outside of blocks whether it is used before them, after them, or both."""
    if len(plan.blocks) < 2:
        return {}
    spans = [range(1), range(1, len(plan.blocks))]
    holders = PipelineCut(module, plan, spans, []).holders
    return {name: BOTH if len(at) > 1 else (FIRST, LAST)[at[0]] for name, at in holders.items()}


def state_of(table: StateTable, work: Work, share: StageShare) -> tuple[UnitState, UnitState, UnitState]:
    """Return the state of a rank: its blocks, the largest block, and the parts outside of blocks."""
    layout = work.layout
    alone = cuts_module(layout) and layout.replicate == 1
    ranks, splits = layout.state_ranks, work.splits_parameters
    return table.of_share(share, _Division(layout.tensor, layout.expert, ranks, work.stage, splits, alone))
