"""Bytes of parameters, gradients and optimizer state on a rank.

They follow the rules of the strategies, like :mod:`trainwright.planning.layout_report`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, reduce
from operator import add
from typing import NamedTuple

from lightning.pytorch import LightningModule

from trainwright.planning.layout_report import OptimizerStates
from trainwright.planning.memory.share import StageShare
from trainwright.planning.memory.weights import Division, Weight, weights_of
from trainwright.planning.model.facts import ModelFacts
from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.plan.model_plan import ModelPlan
from trainwright.strategies.plan.names import inside_any, within

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
        self._of_unit = cache(self._unit_state)
        self.of_share = cache(self._of_share)

    def _sorted(self, tensor: int) -> dict[Unit, list[Weight]]:
        """Return the parameters of each unit for a size of the tensor axis."""
        module, blocks, plan = self.facts.module, self.facts.blocks, self._plans(tensor)
        sides = _sides(self._small, plan)
        seen: dict[int, str] = {}  # kind -> its representative block
        for name, kind in zip(blocks, self.facts.kinds, strict=True):
            seen.setdefault(kind, name)
        others = [name for name in blocks if name not in seen.values()]
        found: dict[Unit, list[Weight]] = {}
        for weight in weights_of(module, plan, tensor, self._halves):
            if not inside_any(weight.name, others):
                side = sides.get(weight.name, BOTH)
                unit: Unit = next((kind for kind, block in seen.items() if within(weight.name, block)), side)
                found.setdefault(unit, []).append(weight)
        return found

    def _unit_state(self, unit: Unit, division: Division) -> UnitState:
        """Return the bytes of a unit on the rank that holds most."""
        return _sum(self._weight_state(each, division) for each in self._units(division.tensor).get(unit, ()))

    def _of_share(self, share: StageShare, division: Division) -> tuple[UnitState, UnitState, UnitState]:
        """Return the state of a rank: its blocks, the largest block, and the parts outside of blocks."""

        def each(unit: Unit) -> UnitState:
            return self._of_unit(unit, division)

        blocks = _sum(each(kind).times(count) for kind, count in share.blocks.items())
        heaviest = max((each(kind) for kind in share.blocks), key=lambda state: state.whole, default=UnitState())
        outside = [each(FIRST)] if share.has_first else []
        outside += [each(LAST)] if share.has_last else []
        outside += [each(BOTH)] if share.has_first or share.has_last else []
        return blocks, heaviest, _sum(outside)

    def _weight_state(self, weight: Weight, division: Division) -> UnitState:
        kept, averaged, stepped = weight.shard(division)
        size, trained = weight.dtype.itemsize, int(weight.whole.requires_grad)
        whole = math.prod(weight.shape(division)) * size
        constant, slope = self._linear(weight) if trained else (0.0, 0.0)
        return UnitState(
            kept=kept * size,
            whole=whole,
            gradients=trained * averaged * size,
            whole_gradients=trained * whole,
            # Linear in the number of elements, which is exact for elementwise optimizers.
            optimizer=constant + slope * math.prod(stepped),
            stepped=trained * math.prod(stepped) * size,
            largest=whole,
            reduced=trained * whole if weight.ranks(division) > 1 or not weight.is_expert else 0.0,
        )

    def _linear(self, weight: Weight) -> tuple[float, float]:
        """Return the constant bytes of optimizer state, and those per element."""
        small, large = (self._states.bytes_of(weight.whole, (rows, 8), weight.dtype) for rows in (8, 16))
        if small is None or large is None:
            return 0.0, 8.0  # the optimizer is unknown: assume Adam's two numbers
        slope = (large - small) / 64
        return small - 64 * slope, slope


def _sides(module: LightningModule, plan: ModelPlan) -> dict[str, str]:
    """Return for each parameter outside of blocks whether it is used before them, after them, or both."""
    if len(plan.blocks) < 2:
        return {}
    holders = PipelineCut(module, plan, [range(1), range(1, len(plan.blocks))], []).holders
    return {name: BOTH if len(at) > 1 else (FIRST, LAST)[at[0]] for name, at in holders.items()}
