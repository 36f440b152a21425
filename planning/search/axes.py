"""Possible sizes of the axes of a layout, by the strategies' own checks of the module.

Each axis is checked once for all layouts that share its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from omegaconf import DictConfig

from trainwright.core.config.options import class_of
from trainwright.core.layout import Layout
from trainwright.core.problems import ConfigError
from trainwright.planning.model.fake_run import FactsError
from trainwright.planning.search.limits import Limits
from trainwright.planning.search.overrides import overrides_of_axes
from trainwright.planning.search.plan import Refusals, describe
from trainwright.planning.search.planned_config import PlannedConfig
from trainwright.planning.search.sizes import divisors_of
from trainwright.planning.time.cost import ModelCut
from trainwright.strategies.compose.engine_options import EngineOptions
from trainwright.strategies.compose.engines import problems_of
from trainwright.strategies.compose.hybrid_options import sequence_length
from trainwright.strategies.compose.model_plan import plan_for
from trainwright.strategies.compose.rules import length_problems, manual_optimization_problems, optimizer_problem
from trainwright.strategies.plan.model_plan import ModelPlan

# Least positions per rank of a context axis of more than two ranks.
_POSITIONS = 2048
_PREFIX = "strategy."


class Axes:
    """Possible sizes of axes; records refusals of others.

    Args:
        config: the configuration.
        limits: fixed choices.
        refusals: extended by this object.
    """

    def __init__(self, config: PlannedConfig, limits: Limits, refusals: Refusals) -> None:
        self._config, self._limits, self._refusals = config, limits, refusals
        self._length = sequence_length(config.cfg)
        optimizer = config.cfg.optimizer
        self._optimizers = [class_of(optimizer)] if isinstance(optimizer, DictConfig) else []
        self._problems = cache(self._problems_of)
        self._allows_expert = cache(self._check_expert)

    def tensors(self) -> Iterator[int]:
        """Yield sizes of the tensor axis; within a node, unless fixed."""
        world, given = self._config.world_size, self._limits.axes.get("tensor")
        node = max(self._config.profile.devices_per_node, 1)
        sizes = [given] if given and world % given == 0 else [t for t in divisors_of(world) if t <= node]
        for tensor in sizes:
            if tensor == 1 or not self._refused(self._problems(Layout(tensor=tensor)), tensor=tensor):
                yield tensor

    def splits_sequence(self, tensor: int) -> bool:
        """Return whether a tensor axis of this size can split activations along the sequence."""
        if tensor == 1 or self._limits.sequence_parallel is False:
            return False
        return not self._problems(Layout(tensor=tensor), sequence_parallel=True)

    def contexts(self, rest: int, tensor: int, sequence: bool) -> Iterator[int]:
        """Yield sizes of the context axis.

        Args:
            rest: ranks besides the tensor axis.
            tensor: size of the tensor axis.
            sequence: whether it splits activations along the sequence.
        """
        most = self._limits.axes.get("context") or max(2, (self._length or 0) // _POSITIONS)
        for context in divisors_of(rest):
            if not self._limits.allow_axis("context", context):
                continue
            if context == 1:
                yield context
                continue
            if context > most:
                return
            problems = list(self._problems(Layout(context=context)))
            if self._length is not None and sequence:
                both = Layout(context=context, tensor=tensor)
                problems += length_problems(both, self._length, sequence_parallel=True)
            if not self._refused(problems, context=context):
                yield context

    def pipelines(self, rest: int) -> Iterator[int]:
        """Yield sizes of the pipeline axis.

        Args:
            rest: ranks besides the tensor and the context axis.
        """
        for pipeline in divisors_of(rest):
            if not self._limits.allow_axis("pipeline", pipeline):
                continue
            if pipeline == 1 or not self._refused(self._problems(Layout(pipeline=pipeline)), pipeline=pipeline):
                yield pipeline
            elif pipeline > max(len(self._config.facts.blocks), 1):
                return

    def experts(self, layout: Layout) -> Iterator[int]:
        """Yield sizes of the expert axis within a closed layout."""
        yield 1
        if not self._config.plan_of(1).experts:
            return
        for expert in divisors_of(layout.state_ranks)[1:]:
            if self._limits.allow_axis("expert", expert) and self._allows_expert(expert):
                yield expert

    def cut(self, tensor: int, context: int, sequence: bool) -> ModelCut | None:
        """Return the cut of a pass; None if the module cannot be run with it.

        Args:
            tensor, context: sizes of these axes.
            sequence: whether the tensor axis splits activations along the sequence.

        Raises:
            ConfigError: if the module does not even run whole.
        """
        cut = ModelCut(tensor=tensor, context=context, sequence_parallel=sequence, attention=self._config.attention)
        ways = [cut]
        may_split_loss = tensor > 1 and context == 1 and self._limits.loss_parallel is not False
        if may_split_loss and not self._problems(Layout(tensor=tensor), loss_parallel=True):
            ways.insert(0, replace(cut, loss_parallel=True))
        problem = ""
        for way in ways:
            try:
                self._config.facts.approximate(way)
            except FactsError as error:
                problem = str(error)
            else:
                return way
        if tensor * context == 1:
            raise ConfigError([problem])
        what = describe("hybrid", Layout(tensor=tensor, context=context), 1)
        self._refusals.add(what, "layout", problem, overrides_of_axes(tensor=tensor, context=context))
        return None

    def _refused(self, problems: list[str], **sizes: int) -> bool:
        """Record the first problem as refusal of an axis of this size, and return whether there are any."""
        for problem in problems[:1]:
            what = " ".join(f"{axis} {size}" for axis, size in sizes.items())
            self._refusals.add(what, "layout", problem, overrides_of_axes(**sizes))
        return bool(problems)

    def _check_expert(self, expert: int) -> bool:
        problems = self._problems(Layout(shard=expert, expert=expert))
        if not problems:
            try:
                self._config.facts.of(ModelCut(expert=expert, attention=self._config.attention))
            except FactsError as error:
                problems = [str(error)]
        return not self._refused(problems, expert=expert)

    def _problems_of(self, layout: Layout, **options: Any) -> list[str]:
        """Return the strategies' problems with a layout for this module, whatever the other axes are."""
        given = self._config.options(**options)
        try:
            found = self._plan_for(layout, given)
            if layout.pipeline > 1:  # a pipeline counts all blocks
                found = replace(found, blocks=tuple(self._config.facts.blocks))
            problems = problems_of(self._config.small, found, layout, given)
        except ValueError as error:
            problems = [str(error)]
        if not self._config.module.automatic_optimization:
            problems += manual_optimization_problems(layout, given.sequence_parallel)
        for name in self._optimizers:
            problems += optimizer_problem(layout, name)
        if self._length is not None:
            problems += length_problems(layout, self._length, sequence_parallel=given.sequence_parallel)
        return problems

    def _plan_for(self, layout: Layout, given: EngineOptions) -> ModelPlan:
        """Return the plan with all that a layout needs; cached where possible, since building it is slow."""
        found = self._config.plan_of(layout.tensor)
        needs_blocks = layout.pipeline > 1 or layout.context > 1 or given.sequence_parallel
        lacks = (needs_blocks and not found.blocks) or (layout.tensor > 1 and not found.tensor)
        if lacks or (layout.expert > 1 and not found.experts):
            return plan_for(self._config.small, layout, given)  # its error says what is missing
        return found
