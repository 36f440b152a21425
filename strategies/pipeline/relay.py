"""Evaluation: every stage runs the user's whole step, and the blocks' results go from rank to rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.first_step import block_values
from trainwright.strategies.pipeline.first_step.block_values import BlockValue, Call, Places
from trainwright.strategies.pipeline.first_step.step_randomness import StepRandomness
from trainwright.strategies.pipeline.first_step.survey import Survey
from trainwright.strategies.pipeline.form import Carrier, Form, take_apart
from trainwright.strategies.pipeline.gates import order_message
from trainwright.strategies.plan.arguments import arguments, first_tensor
from trainwright.strategies.plan.hugging_face import caches_every_layer, layer_of

_CACHES = ("past_key_value", "past_key_values", "layer_past")


@cache
def _cache_positions(forward: Callable[..., Any]) -> dict[str, int]:
    """Where a block's forward takes a key-value cache by position."""
    names = list(inspect.signature(forward).parameters)[1:]
    return {name: names.index(name) for name in _CACHES if name in names}


class RelayPass:
    """A run of a user's function on every rank of the pipeline, with any number of passes through the blocks.

    Args:
        cut: the cut of the module.
        ranks: rank in the pipeline of each stage.
        carrier: moves activations.
        survey: follows what is computed; ``None``: nothing does.
        everything: whether every rank gets all that each block leaves; ``False``: what its next stage is given, and the
            output of the last block.

    Attributes:
        randomness: as in :class:`StagePass`.
        passes: how many have begun.
    """

    def __init__(
        self,
        cut: PipelineCut,
        ranks: Sequence[int],
        carrier: Carrier,
        survey: Survey | None = None,
        everything: bool = False,
    ) -> None:
        self._cut, self._ranks, self._carrier = cut, ranks, carrier
        self.survey, self._everything = survey, everything
        self.randomness: StepRandomness | None = None
        self._forms: dict[int, Form] = {}
        self._places: dict[int, Places] = {}
        self._next, self.passes = 0, 0
        self._held: Any = None
        self._in_gap = False
        self._caches: dict[int, tuple[int, Any]] = {}
        self._new_positions = torch.empty(0)
        self._positions = [_cache_positions(type(block).forward) for block in cut.blocks]

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block of this rank, or return what came from the others; see :class:`Pass`."""
        count = len(self._cut.blocks)
        if index == 0 and self._next in (0, count):
            self._next, self._in_gap = 0, False
            self.passes += 1
        if index != self._next:
            raise RuntimeError(order_message(self._cut.names, index, self._next))
        self._follow_cache(index, args, kwargs)
        self._next += 1
        if index == 0 and not self._cut.owns_block(0):
            block_values.enter_skipped(self._cut.blocks[0], args, kwargs, self._cut.engine_hooks)
        if self.survey is not None:
            self.survey.enter_block(index, args, kwargs)
        if self._everything:
            with self.survey.paused() if self.survey is not None else nullcontext():
                return self._told(index, call, args, kwargs)
        if self._cut.owns_block(index):
            self._in_gap = False
            return self._own(index, call, args, kwargs)
        if not self._in_gap:
            self._in_gap, self._held = True, self._next_result(index)
        return self._held

    def _told(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block and tell all ranks what it has left, or hear of it."""
        block, name = self._cut.blocks[index], f"The block {self._cut.names[index]!r}"
        rank = self._ranks[self._cut.stage_of_block(index)]
        if not self._cut.owns_block(index):
            told = self._carrier.broadcast(rank)
            if isinstance(told, str):
                raise RuntimeError(told)
            value = BlockValue(*told)
            self._keep(index, value, name)
            return block_values.replay(block, value, self._cut.engine_hooks)
        try:
            with self._random(), self.survey.running(index) if self.survey is not None else nullcontext():
                value = block_values.observed_call(block, call, args, kwargs, self._cut.engine_hooks, self.survey)
            take_apart(tuple(value), name)
        except Exception as error:
            self._carrier.broadcast(rank, f"{name} failed on its rank: {type(error).__name__}: {error}", name)
            raise
        self._carrier.broadcast(rank, tuple(value), name)
        self._keep(index, value, name)
        return value.output

    def _keep(self, index: int, value: BlockValue, name: str) -> None:
        self._forms[index], tensors = value.take_apart(name)
        hooked = tuple(dict.fromkeys(path for path, _, _ in value.hooked))
        self._places[index] = Places(tuple(value.attributes), hooked)
        if self.survey is not None:
            self.survey.leave_block(index, tensors)

    def known(self) -> tuple[list[Form], list[Places]]:
        """Forms of the blocks' values in the last pass, and where they were left, if every rank gets everything."""
        return [self._forms[i] for i in sorted(self._forms)], [self._places[i] for i in sorted(self._places)]

    def finish(self) -> None:
        """Check that no pass was left in the middle.

        Raises:
            RuntimeError: if one was.
        """
        if self._next not in (0, len(self._cut.blocks)):
            raise RuntimeError(
                f"The step ended after the block {self._cut.names[self._next - 1]!r}. Under a pipeline, every pass "
                f"must go through all blocks: {self._cut.names[0]} to {self._cut.names[-1]}. Use pipeline=1 "
                f"for this model."
            )

    def _own(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._random():
            output = call(*args, **kwargs)
        stage, name = self._cut.stage_of_block(index), f"The block {self._cut.names[index]!r}"
        if index == len(self._cut.blocks) - 1:
            self._carrier.broadcast(self._ranks[stage], output, name)
        elif index == self._cut.spans[stage].stop - 1 and self._ranks[stage + 1] != self._ranks[stage]:
            self._carrier.send(output, self._ranks[stage + 1], name)
        return output

    def _random(self) -> AbstractContextManager[None]:
        return self.randomness.block() if self.randomness is not None else nullcontext()

    def _next_result(self, index: int) -> Any:
        """What this rank sees next: the input of its next stage, or the last block's output.

        It comes at the first of the blocks skipped in between, so that each of them returns a structure like its own.
        """
        coming = [stage for stage in self._cut.mine if self._cut.spans[stage].start > index]
        if coming:
            return self._carrier.receive(self._ranks[coming[0] - 1])
        return self._carrier.broadcast(self._ranks[-1])

    def _follow_cache(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let a key-value cache count the positions of a block that runs on another rank, or refuse it if it cannot."""
        for name in _CACHES:
            held = kwargs.get(name)
            position = self._positions[index].get(name)
            if held is None and position is not None and position < len(args):
                held = args[position]
            if held is None or self._counts(index, held, args, kwargs):
                continue
            # Kept alive, so that its id is not another's later.
            first, _ = self._caches.setdefault(id(held), (self.passes, held))
            if first != self.passes:
                raise RuntimeError(
                    f"The block {self._cut.names[index]!r} is given a key-value cache ({name}, {type(held).__name__}) "
                    f"of an earlier pass. Under a pipeline each stage holds its own blocks' part of it, which only the "
                    f"caches of Hugging Face transformers with keys and values for every layer support: set "
                    f"use_cache=False."
                )

    def _counts(self, index: int, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a cache counts all positions; those of a block that runs on another rank are added here."""
        layer = layer_of(self._cut.blocks[index])
        if layer is None or not caches_every_layer(cache):
            return False
        if index == 0:  # later ones may be called with parts of the sequence
            given = arguments(args, kwargs)
            states = given[first_tensor(given, "A block was called without a tensor.")]
            # One head of width 1: code outside of the blocks asks for lengths alone.
            self._new_positions = states.new_zeros(1).expand(states.size(0), 1, states.size(1), 1)
        if not self._cut.owns_block(index):
            cache.update(self._new_positions, self._new_positions, layer)
        return True
