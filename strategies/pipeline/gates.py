"""Gates in front of the blocks: in a stage's run of the user's step, they run its blocks and skip all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.pipeline.cut import put
from trainwright.strategies.pipeline.first_step import block_values
from trainwright.strategies.pipeline.first_step.block_values import BlockValue, Call, Placeholder
from trainwright.strategies.pipeline.first_step.routes import StageRoutes
from trainwright.strategies.pipeline.first_step.step_randomness import StepRandomness
from trainwright.strategies.pipeline.first_step.survey import Source
from trainwright.strategies.pipeline.form import tensors_in


class StageDone(Exception):  # noqa: N818 - no error: it leaves the user's step after a stage's last block
    """Raised by the first block after a stage's own; :meth:`PipelineEngine.call` catches it."""


class Pass(Protocol):
    """One run of the user's step, as the gates see it."""

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call of block ``index`` returns; ``call`` runs it."""


class Gates:
    """One gate per block, around everything else that was hooked to it.

    Args:
        blocks: in the order in which they run.

    Attributes:
        current: the run that is going on. Without one (a recomputation in backward, a call of the user's), blocks run
            as they are.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._before: list[Any] | None = None
        self.current: Pass | None = None

    def attach(self) -> None:
        """Install the gates; do so after all other hooks, patches and compilations of the blocks."""
        if self._before is not None:
            return
        self._before = [block._compiled_call_impl for block in self._blocks]
        for index, block in enumerate(self._blocks):
            # Torch calls this instead of the hooks and forward: the place of a compiled block.
            block.__dict__["_compiled_call_impl"] = self._gate(index, block._compiled_call_impl or block._call_impl)

    def detach(self) -> None:
        """Remove the gates."""
        for block, before in zip(self._blocks, self._before or [], strict=False):
            if before is None:
                block.__dict__.pop("_compiled_call_impl", None)
            else:
                block.__dict__["_compiled_call_impl"] = before
        self._before = None

    def _gate(self, index: int, call: Call) -> Call:
        def gate(*args: Any, **kwargs: Any) -> Any:
            if self.current is None:
                return call(*args, **kwargs)
            return self.current.block(index, call, args, kwargs)

        return gate


class StagePass:
    """One stage's run of a training step on one micro-batch.

    Args:
        routes: what travels.
        stage: whose run it is.
        received: what the stage before handed over; not used by the first stage.

    Attributes:
        output: of the stage's last block, once it ran.
        randomness: gives own blocks the generators of the rank; ``None``: they have them.
    """

    def __init__(self, routes: StageRoutes, stage: int, received: Any) -> None:
        self.span, self.output = routes.cut.spans[stage], None  # type: range, Any
        self.randomness: StepRandomness | None = None
        self._routes, self._cut, self._stage = routes, routes.cut, stage
        self._names = routes.cut.names
        arriving = routes.sent[stage - 1] if stage else ()
        self._main, carried = received if arriving else (received, ())
        self._carried: dict[Source, Tensor] = dict(zip(arriving, carried, strict=True))
        self._own: dict[Source, Tensor] = {}
        self._stand_in: Any = None
        self._next = 0
        self._versions: list[int] = []

    @property
    def is_last(self) -> bool:
        """Whether this is the stage that reaches the loss."""
        return self.span.stop == len(self._names)

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run, skip or end; see :class:`Pass`."""
        if index != self._next:
            raise RuntimeError(order_message(self._names, index, self._next))
        if index == self.span.stop:
            self._check_unchanged()
            raise StageDone
        self._next += 1
        if index < self.span.start:
            return self._skip(index)
        if any(type(value) is Placeholder for value in (*args, *kwargs.values())):
            block_values.refuse_placeholders((args, kwargs), f"What is given to the block {self._names[index]!r}")
        with self.randomness.block() if self.randomness is not None else nullcontext():
            output = self._call(index, call, args, kwargs)
        if index == self.span.stop - 1 and not self.is_last:
            self.output = self._copied(index, output)
            self._versions = [t._version for t in tensors_in(self.output)]
        return output

    def _call(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index not in self._routes.kept:
            return call(*args, **kwargs)
        value = block_values.known_call(self._cut.blocks[index], call, args, kwargs, self._routes.places[index])
        _, tensors = value.take_apart(f"The block {self._names[index]!r}")
        if len(tensors) != len(self._routes.forms[index].tensors):
            raise RuntimeError(
                f"The block {self._names[index]!r} leaves {len(tensors)} tensors for code outside of it, and left "
                f"{len(self._routes.forms[index].tensors)} in the first step. Under a pipeline each step must leave "
                f"the same ones; use pipeline=1 for this model."
            )
        for source in self._routes.sent[self._stage]:
            if source.kind == "block" and source.block == index:
                tensor = tensors[source.leaf]
                self._own[source] = tensor.clone() if source in self._routes.cloned else tensor
        return value.output

    def _copied(self, index: int, output: Any) -> Any:
        """The output to be sent: a copy of what is changed in place before the next block is called."""
        return pytree.tree_map_only(Tensor, Tensor.clone, output) if index in self._routes.copied else output

    def _skip(self, index: int) -> Any:
        """What a block of a stage before returns."""
        routes = self._routes
        if index not in routes.rebuilt[self._stage]:
            if index == self.span.start - 1:
                return self._main
            if self._stand_in is None:
                is_one, stand_in = type(self._main) is Tensor, routes.stand_in
                self._stand_in = stand_in(self._main) if is_one else pytree.tree_map_only(Tensor, stand_in, self._main)
            return self._stand_in
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
        """Result of ``function``, which runs the user's step, or what is sent on if the stage ends before.

        Raises:
            RuntimeError: see :meth:`block` and :meth:`finish`.
        """
        borrowed = [(source.name, t) for source, t in self._carried.items() if source.name in self._cut.ghosts]
        for name, tensor in borrowed:
            put(self._cut.slots(name), tensor)
        try:
            output = function()
        except StageDone:
            return self._outgoing()
        finally:
            for name, _ in borrowed:
                self._cut.put_ghost_back(name)
        self.finish()
        block_values.refuse_placeholders(output, "What training_step returns")
        return output

    def _outgoing(self) -> Any:
        sent = self._routes.sent[self._stage]
        return (self.output, tuple(self._sent_on(source) for source in sent)) if sent else self.output

    def _sent_on(self, source: Source) -> Tensor:
        if source in self._own:
            return self._own[source]
        if source in self._carried:
            return self._carried[source]
        owner, key = self._cut.slots(source.name)[0]
        parameter: Tensor = getattr(owner, key)
        # Not the parameter itself: hooks are put on what a stage returns.
        return parameter.view_as(parameter)

    def finish(self) -> None:
        """Check that the step went through all of the stage's blocks.

        Raises:
            RuntimeError: if it ended before.
        """
        if self._next == self.span.stop and self.is_last:
            return
        raise RuntimeError(unfinished_message(self._names, self._next))

    def _check_unchanged(self) -> None:
        if self._versions != [t._version for t in tensors_in(self.output)]:
            raise RuntimeError(
                f"What the block {self._names[self.span.stop - 1]!r} returned is changed in place before the next "
                f"block is called, which it was not in the first step. The next stage would do so again: use an "
                f"operation that makes a new tensor (x = x + y, not x += y)."
            )


def unfinished_message(names: Sequence[str], then: int) -> str:
    """What to say when a step ends without having called all blocks."""
    return (
        f"training_step ended without calling the block {names[min(then, len(names) - 1)]!r}. A pipeline needs a step "
        f"that calls every block once, in the order of plan.blocks: {names[0]} to {names[-1]}. (If the step catches "
        f"exceptions, let StageDone pass.)"
    )


def order_message(names: Sequence[str], index: int, expected: int) -> str:
    """What to say when a block is called out of order."""
    then = f"{names[expected]!r} was next" if expected < len(names) else "all blocks had run"
    return (
        f"The block {names[index]!r} was called when {then}. A pipeline needs one pass through the blocks in the order "
        f"of plan.blocks in every step: no block twice, none left out, none in another order. Use pipeline=1 for this "
        f"model, or name other blocks (plan.blocks)."
    )
