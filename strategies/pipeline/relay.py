"""Evaluation in a pipeline: every stage runs the whole step, with block results sent from rank to rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

from trainwright.strategies.pipeline.cut import PipelineCut
from trainwright.strategies.pipeline.gates import order_message
from trainwright.strategies.pipeline.tracing import block_values
from trainwright.strategies.pipeline.tracing.block_values import BlockValue, Call, SideOutputs
from trainwright.strategies.pipeline.tracing.dependency_trace import DependencyTrace
from trainwright.strategies.pipeline.tracing.step_randomness import StepRandomness
from trainwright.strategies.pipeline.value_spec import ValueChannel, ValueSpec, to_spec
from trainwright.strategies.plan.arguments import arguments, first_tensor
from trainwright.strategies.plan.hugging_face import caches_every_layer, layer_of

_CACHES = ("past_key_value", "past_key_values", "layer_past")


@cache
def _cache_positions(forward: Callable[..., Any]) -> dict[str, int]:
    """Return the positional index of key-value caches in a block's forward."""
    names = list(inspect.signature(forward).parameters)[1:]
    return {name: names.index(name) for name in _CACHES if name in names}


class RelayPass:
    """Run of a function on every rank of the pipeline, with any number of passes through the blocks.

    Args:
        cut: of the module.
        ranks: rank in the pipeline of each stage.
        channel: of activations.
        trace: dependency trace; ``None``: no tracing.
        everything: every rank gets all block values; ``False``: the input of its next stage, and the last block's
            output.

    Attributes:
        randomness: as in :class:`StagePass`.
        passes: number of passes started.
    """

    def __init__(
        self,
        cut: PipelineCut,
        ranks: Sequence[int],
        channel: ValueChannel,
        trace: DependencyTrace | None = None,
        everything: bool = False,
    ) -> None:
        self._cut, self._ranks, self._channel = cut, ranks, channel
        self.trace, self._everything = trace, everything
        self.randomness: StepRandomness | None = None
        self._forms: dict[int, ValueSpec] = {}
        self._places: dict[int, SideOutputs] = {}
        self._next, self.passes = 0, 0
        self._exchanged = 0  # blocks of this pass, if every rank gets everything
        self._held: Any = None
        self._in_gap = False
        self._caches: dict[int, tuple[int, Any]] = {}
        self._new_positions = torch.empty(0)
        self._positions = [_cache_positions(type(block).forward) for block in cut.blocks]

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block of this rank, or return the received result; see :class:`Pass`."""
        count = len(self._cut.blocks)
        if index == 0 and self._next in (0, count):
            self._next, self._exchanged, self._in_gap = 0, 0, False
            self.passes += 1
        if index != self._next:
            raise RuntimeError(order_message(self._cut.names, index, self._next))
        self._count_cache_positions(index, args, kwargs)
        self._next += 1
        if index == 0 and not self._cut.owns_block(0):
            block_values.enter_skipped(self._cut.blocks[0], args, kwargs, self._cut.engine_hooks)
        if self.trace is not None:
            self.trace.enter_block(index, args, kwargs)
        if self._everything:
            with self.trace.paused() if self.trace is not None else nullcontext():
                return self._run_and_broadcast(index, call, args, kwargs)
        if self._cut.owns_block(index):
            self._in_gap = False
            return self._own(index, call, args, kwargs)
        if not self._in_gap:
            self._in_gap, self._held = True, self._next_result(index)
        return self._held

    def unit(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module outside of the blocks."""
        return call(*args, **kwargs)

    def _run_and_broadcast(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block and broadcast its value, or receive and replay it."""
        block, name = self._cut.blocks[index], f"The block {self._cut.names[index]!r}"
        rank = self._ranks[self._cut.stage_of_block(index)]
        if not self._cut.owns_block(index):
            received = self._channel.broadcast(rank)
            self._exchanged = index + 1
            if isinstance(received, str):
                raise RuntimeError(received)
            value = BlockValue(*received)
            self._keep(index, value, name)
            return block_values.replay(block, value, self._cut.engine_hooks)
        try:
            with self._random(), self.trace.running(index) if self.trace is not None else nullcontext():
                value = block_values.observed_call(block, call, args, kwargs, self._cut.engine_hooks, self.trace)
            to_spec(tuple(value), name)
        except Exception as error:
            self.fail(error, index + 1)
            raise
        self._channel.broadcast(rank, tuple(value), name)
        self._exchanged = index + 1
        self._keep(index, value, name)
        return value.output

    def fail(self, error: Exception, blocks: int | None = None) -> None:
        """Exchange an error in place of the next values up to ``blocks``, default all: other ranks wait for them."""
        for index in range(self._exchanged, blocks or len(self._cut.blocks)):
            name = self._cut.names[index]
            text = f"The block {name!r} failed on its rank: {type(error).__name__}: {error}"
            self._channel.broadcast(self._ranks[self._cut.stage_of_block(index)], text, name)
            self._exchanged = index + 1

    def _keep(self, index: int, value: BlockValue, name: str) -> None:
        self._forms[index], tensors = value.to_spec(name)
        hooked = tuple(dict.fromkeys(path for path, _, _ in value.hooked))
        self._places[index] = SideOutputs(tuple(value.attributes), hooked)
        if self.trace is not None:
            self.trace.leave_block(index, tensors)

    def known(self) -> tuple[list[ValueSpec], list[SideOutputs]]:
        """Return specs and side outputs of the blocks in the last pass, if every rank gets everything."""
        return [self._forms[i] for i in sorted(self._forms)], [self._places[i] for i in sorted(self._places)]

    def finish(self) -> None:
        """Check that no pass is incomplete.

        Raises:
            RuntimeError: if one is.
        """
        if self._next not in (0, len(self._cut.blocks)):
            raise RuntimeError(
                f"The step ended after the block {self._cut.names[self._next - 1]!r}. Under a pipeline, every pass "
                f"must visit all blocks: {self._cut.names[0]} to {self._cut.names[-1]}. Use pipeline=1 for this model."
            )

    def _own(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._random():
            output = call(*args, **kwargs)
        stage, name = self._cut.stage_of_block(index), f"The block {self._cut.names[index]!r}"
        if index == len(self._cut.blocks) - 1:
            self._channel.broadcast(self._ranks[stage], output, name)
        elif index == self._cut.spans[stage].stop - 1 and self._ranks[stage + 1] != self._ranks[stage]:
            self._channel.send(output, self._ranks[stage + 1], name)
        return output

    def _random(self) -> AbstractContextManager[None]:
        return self.randomness.block() if self.randomness is not None else nullcontext()

    def _next_result(self, index: int) -> Any:
        """Return this rank's next result: the input of its next stage, or the last block's output.

        Received at the first of the blocks skipped in between, so that each returns a matching structure.
        """
        coming = [stage for stage in self._cut.mine if self._cut.spans[stage].start > index]
        if coming:
            return self._channel.receive(self._ranks[coming[0] - 1])
        return self._channel.broadcast(self._ranks[-1])

    def _count_cache_positions(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add a remote block's positions to a key-value cache, or raise if that is not supported."""
        for name in _CACHES:
            held = kwargs.get(name)
            position = self._positions[index].get(name)
            if held is None and position is not None and position < len(args):
                held = args[position]
            if held is None or self._counts(index, held, args, kwargs):
                continue
            # Kept alive, so that its id is not reused.
            first, _ = self._caches.setdefault(id(held), (self.passes, held))
            if first != self.passes:
                raise RuntimeError(
                    f"The block {self._cut.names[index]!r} is given a key-value cache ({name}, {type(held).__name__}) "
                    "of an earlier pass. Under a pipeline each stage holds only its own blocks' part of it, which only "
                    "Hugging Face transformers caches with keys and values for every layer support: set "
                    "use_cache=False."
                )

    def _counts(self, index: int, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a cache counts all positions; adds those of blocks on other ranks."""
        layer = layer_of(self._cut.blocks[index])
        if layer is None or not caches_every_layer(cache):
            return False
        if index == 0:  # later blocks may get parts of the sequence
            given = arguments(args, kwargs)
            states = given[first_tensor(given, "A block was called without a tensor.")]
            # One head of width 1: code outside of the blocks needs lengths only.
            self._new_positions = states.new_zeros(1).expand(states.size(0), 1, states.size(1), 1)
        if not self._cut.owns_block(index):
            cache.update(self._new_positions, self._new_positions, layer)
        return True
