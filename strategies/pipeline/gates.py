"""Gates around blocks, which run a stage's own blocks and skip others in the user's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.core.torch_internals import peek_interpreter_stack
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.pipeline.cut import PipelineCut, put
from trainwright.strategies.pipeline.tracing import block_values
from trainwright.strategies.pipeline.tracing.block_values import BlockValue, Call, Placeholder
from trainwright.strategies.pipeline.tracing.dependency_trace import Source
from trainwright.strategies.pipeline.tracing.routes import StageRoutes
from trainwright.strategies.pipeline.tracing.step_randomness import StepRandomness
from trainwright.strategies.pipeline.tracing.whole_batch import Kind, NotAdditive, Replay, StageDone
from trainwright.strategies.pipeline.value_spec import tensors_in


class Pass(Protocol):
    """One run of the user's step, as seen by the gates."""

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of block ``index``; ``call`` runs it."""

    def unit(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a module outside of the blocks; ``call`` runs it."""


class Gates:
    """One gate per block, and per module with parameters outside of the blocks, around all of its hooks.

    Args:
        blocks: in execution order.
        units: modules outside of the blocks.

    Attributes:
        current: the active run; without one (recomputation in backward, direct calls) blocks run normally.
    """

    def __init__(self, blocks: Sequence[nn.Module], units: Sequence[nn.Module]) -> None:
        self._blocks, self._units = blocks, units
        self._attached = ExitStack()
        self.current: Pass | None = None

    def attach(self) -> None:
        """Install the gates, after all other hooks, patches and compilations of the blocks."""
        gates = [(block, partial(self._gate, index)) for index, block in enumerate(self._blocks)]
        for module, gate in (*gates, *((unit, partial(self._unit_gate, unit)) for unit in self._units)):
            # Torch calls this instead of hooks and forward, as for a compiled block.
            call = gate(module._compiled_call_impl or module._call_impl)
            self._attached.enter_context(with_attributes(module, _compiled_call_impl=call))

    def detach(self) -> None:
        """Remove the gates."""
        self._attached.close()

    def _gate(self, index: int, call: Call) -> Call:
        def gate(*args: Any, **kwargs: Any) -> Any:
            if self.current is None:
                return call(*args, **kwargs)
            if peek_interpreter_stack() is not None:  # on every rank, before one sends what the others wait for
                raise RuntimeError(
                    "training_step calls a block within a transform of torch.func (vmap, jvp, grad, ...), whose values "
                    "cannot be sent from stage to stage. Use pipeline=1 for this model."
                )
            return self.current.block(index, call, args, kwargs)

        return gate

    def _unit_gate(self, unit: nn.Module, call: Call) -> Call:
        def gate(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs) if self.current is None else self.current.unit(unit, call, args, kwargs)

        return gate


def units_of(module: nn.Module, cut: PipelineCut) -> list[nn.Module]:
    """Return the largest modules with parameters that neither are blocks nor contain any, and metrics."""
    blocks = {id(block) for block in cut.blocks}
    owners = {id(owner) for name in cut.holders for owner, _ in cut.slots(name)}
    found: list[nn.Module] = []
    waiting = [module]
    while waiting:
        for child in waiting.pop().children():
            ids = {id(sub) for sub in child.modules()}
            if id(child) in blocks or any(child is known for known in found):
                continue
            is_container = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
            if ids & blocks or (is_container and ids & owners):
                waiting.append(child)
            elif ids & owners or isinstance(child, Metric | MetricCollection):
                found.append(child)
    return found


class StagePass:
    """One stage's run of a training step on one micro-batch.

    Args:
        routes: of sent values.
        stage: index of the stage; the number of stages: of the code after the blocks by itself.
        received: from the previous stage; unused by the first.

    Attributes:
        output: of the stage's last block, once it ran.
        replay: of the whole batch's values; ``None``: not needed.
        leaves_after: whether the step ends after the stage's last block, although no block follows.
        randomness: switches own blocks to the rank's generators; ``None``: not needed.
    """

    def __init__(self, routes: StageRoutes, stage: int, received: Any) -> None:
        count = len(routes.cut.names)
        self.span: range = routes.cut.spans[stage] if stage < routes.cut.stages else range(count, count)
        self.output: Any = None
        self.randomness: StepRandomness | None = None
        self.replay: Replay | None = None
        self.leaves_after = False
        self._routes, self._cut, self.stage = routes, routes.cut, stage
        self._names = routes.cut.names
        arriving = routes.sent[stage - 1] if stage else ()
        self._main, carried = received if arriving else (received, ())
        self._carried: dict[Source, Tensor] = dict(zip(arriving, carried, strict=True))
        self._own: dict[Source, Tensor] = {}
        self._skipped_output: Any = None
        self._next = 0
        self._versions: list[int] = []

    @property
    def is_last(self) -> bool:
        """True if this is the last stage."""
        return self.span.stop == len(self._names)

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip a block, or end the step; see :class:`Pass`."""
        if index != self._next:
            raise RuntimeError(order_message(self._names, index, self._next))
        if index == self.span.stop:
            self._check_unchanged()
            raise StageDone
        self._next += 1
        if index < self.span.start:
            with nullcontext() if self.replay is None else self.replay.paused():
                skipped = self._skip(index)
            return self._marked(skipped)
        if any(type(value) is Placeholder for value in (*args, *kwargs.values())):
            block_values.refuse_placeholders((args, kwargs), f"What is given to the block {self._names[index]!r}")
        with ExitStack() as stack:
            if self.replay is not None:
                stack.enter_context(self.replay.paused())
            if self.randomness is not None:
                stack.enter_context(self.randomness.block())
            output = self._call(index, call, args, kwargs)
        if index == self.span.stop - 1 and (not self.is_last or self.leaves_after):
            # Sent as a copy if it is changed in place before the next block.
            copied = index in self._routes.copied
            self.output = pytree.tree_map_only(Tensor, Tensor.clone, output) if copied else output
            self._versions = [t._version for t in tensors_in(self.output)]
            if self.leaves_after:
                raise StageDone
        return self._marked(output)

    def _marked(self, output: Any) -> Any:
        if self.replay is not None:
            self.replay.mark(output, Kind.SAMPLES)
        return output

    def unit(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module outside of the blocks."""
        return call(*args, **kwargs) if self.replay is None else self.replay.unit(module, call, args, kwargs)

    def _call(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index not in self._routes.kept:
            return call(*args, **kwargs)
        value = block_values.known_call(self._cut.blocks[index], call, args, kwargs, self._routes.places[index])
        _, tensors = value.to_spec(f"The block {self._names[index]!r}")
        if len(tensors) != len(self._routes.forms[index].tensors):
            raise RuntimeError(
                f"The block {self._names[index]!r} provides {len(tensors)} tensors to code outside of it, but provided "
                f"{len(self._routes.forms[index].tensors)} in the first step. Under a pipeline each step must provide "
                "the same ones; use pipeline=1 for this model."
            )
        for source in self._routes.sent[self.stage]:
            if source.kind == "block" and source.block == index:
                tensor = tensors[source.leaf]
                self._own[source] = tensor.clone() if source in self._routes.cloned else tensor
        return value.output

    def _skip(self, index: int) -> Any:
        """Return the result of a block of an earlier stage."""
        routes = self._routes
        if index not in routes.rebuilt[self.stage]:
            if index == self.span.start - 1:
                return self._main
            if self._skipped_output is None:
                self._skipped_output = pytree.tree_map_only(Tensor, _placeholder_like, self._main)
            return self._skipped_output
        form, outputs = routes.forms[index], routes.tensors_of_output(index)
        main = tensors_in(self._main)
        tensors = []
        for leaf, tensor in enumerate(form.tensors):
            source = Source("block", block=index, leaf=leaf)
            if index == self.span.start - 1 and leaf < outputs:
                tensors.append(main[leaf])
            elif source in self._carried:
                carried = self._carried[source]
                tensors.append(carried.clone() if source in routes.cloned else carried)
            else:
                shape = main[leaf].shape if leaf < min(outputs, len(main)) else tensor.shape
                made = block_values.placeholder(shape, tensor.dtype, main[0].device if main else torch.device("cpu"))
                tensors.append(made.clone() if source in routes.cloned else made)
        output, attributes, hooked = form.build(tensors)
        value = BlockValue(output, dict(zip(routes.places[index].attributes, attributes, strict=True)), hooked)
        return block_values.replay(self._cut.blocks[index], value, self._cut.engine_hooks)

    def run(self, function: Callable[[], Any]) -> Any:
        """Return the result of ``function``, which runs the user's step, or what is sent if the stage ends early.

        Raises:
            RuntimeError: see :meth:`block`; if it ended before all of the stage's blocks.
        """
        borrowed = [(source.name, t) for source, t in self._carried.items() if source.name in self._cut.ghosts]
        for name, tensor in borrowed:
            put(self._cut.slots(name), tensor)
            if self.replay is not None:
                self.replay.mark(tensor, Kind.PARAMETER)
        try:
            with self.replay or nullcontext():
                output = function()
        except NotAdditive:
            return None
        except StageDone:
            sent = self._routes.sent[self.stage]
            return (self.output, tuple(map(self._sent_on, sent))) if sent else self.output
        finally:
            for name, _ in borrowed:
                self._cut.put_ghost_back(name)
        if not (self.is_last and self._next == self.span.stop):
            then = self._names[min(self._next, len(self._names) - 1)]
            raise RuntimeError(
                f"training_step ended without calling the block {then!r}. A pipeline needs a step that calls every "
                f"block once, in the order of plan.blocks: {self._names[0]} to {self._names[-1]}. (If the step catches "
                "exceptions, re-raise StageDone.)"
            )
        block_values.refuse_placeholders(output, "What training_step returns")
        return output

    def _sent_on(self, source: Source) -> Tensor:
        if source in self._own:
            return self._own[source]
        if source in self._carried:
            return self._carried[source]
        owner, key = self._cut.slots(source.name)[0]
        parameter: Tensor = getattr(owner, key)
        # Not the parameter itself: hooks are registered on outputs of a stage.
        return parameter.view_as(parameter)

    def _check_unchanged(self) -> None:
        if self._versions != [t._version for t in tensors_in(self.output)]:
            raise RuntimeError(
                f"The output of the block {self._names[self.span.stop - 1]!r} is changed in place before the next "
                "block is called, but was not in the first step. The next stage would repeat it: use an operation that "
                "creates a new tensor (x = x + y, not x += y)."
            )


def _placeholder_like(tensor: Tensor) -> Tensor:
    return block_values.placeholder(tensor.shape, tensor.dtype, tensor.device)


def order_message(names: Sequence[str], index: int, expected: int) -> str:
    """Return the error of a block called out of order."""
    then = f"{names[expected]!r} was next" if expected < len(names) else "all blocks had run"
    return (
        f"The block {names[index]!r} was called when {then}. A pipeline needs one pass through the blocks in the order "
        "of plan.blocks in every step, each exactly once. Use pipeline=1 for this model, or name other blocks "
        "(plan.blocks)."
    )
