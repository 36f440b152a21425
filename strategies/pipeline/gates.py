"""Gates in front of the blocks: in a stage's run of the user's step, they run its blocks and skip all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree

Call = Callable[..., Any]
Enter = Callable[[int, Any, Any], AbstractContextManager[Any]]


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
        names: of all blocks.
        span: the stage's blocks.
        received: what the stage before handed over; not used by the first stage.

    Attributes:
        output: of the stage's last block, once it ran.
        enter: called with a block's index, arguments and keyword arguments before an own block runs, and returns a
            context manager around it; ``None`` is none.
        watch: to be entered while the step runs; ``None`` is none.
    """

    def __init__(self, names: Sequence[str], span: range, received: Any) -> None:
        self.span, self.received = span, received
        self.output: Any = None
        self.enter: Enter | None = None
        self.watch: AbstractContextManager[Any] | None = None
        self._names = names
        self._next = 0
        self._versions: list[int] = []

    @property
    def is_last(self) -> bool:
        """Whether this is the stage that reaches the loss."""
        return self.span.stop == len(self._names)

    @property
    def phase(self) -> str:
        """``before`` the first block was called, ``after`` the last was, or ``between``."""
        return "before" if self._next == 0 else "after" if self._next == len(self._names) else "between"

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run, skip or end; see :class:`Pass`."""
        if index != self._next:
            raise RuntimeError(order_message(self._names, index, self._next))
        if index == self.span.stop:
            self._check_unchanged()
            raise StageDone
        self._next += 1
        if index < self.span.start:
            return self.received
        with self.enter(index, args, kwargs) if self.enter is not None else nullcontext():
            output = call(*args, **kwargs)
        if index == self.span.stop - 1 and not self.is_last:
            self.output = output
            self._versions = [t._version for t in _tensors_of(output)]
        return output

    def run(self, function: Callable[[], Any]) -> Any:
        """Result of ``function``, which runs the user's step, or the stage's output if it ends before.

        Raises:
            RuntimeError: see :meth:`block` and :meth:`finish`.
        """
        with self.watch if self.watch is not None else nullcontext():
            try:
                output = function()
            except StageDone:
                return self.output
        self.finish()
        return output

    def finish(self) -> None:
        """Check that the step went through all of the stage's blocks.

        Raises:
            RuntimeError: if it ended before.
        """
        if self._next == self.span.stop and self.is_last:
            return
        raise RuntimeError(
            f"training_step ended without calling the block {self._names[min(self._next, len(self._names) - 1)]!r}. A "
            f"pipeline needs a step that calls every block once, in the order of plan.blocks: "
            f"{self._names[0]} to {self._names[-1]}. (If the step catches exceptions, let StageDone pass.)"
        )

    def _check_unchanged(self) -> None:
        if self._versions != [t._version for t in _tensors_of(self.output)]:
            raise RuntimeError(
                f"What the block {self._names[self.span.stop - 1]!r} returned is changed in place before the next "
                f"block is called. The next stage would do so again: use an operation that makes a new tensor "
                f"(x = x + y, not x += y), or move the boundary of the stages with split."
            )


def order_message(names: Sequence[str], index: int, expected: int) -> str:
    """What to say when a block is called out of order."""
    then = f"{names[expected]!r} was next" if expected < len(names) else "all blocks had run"
    return (
        f"The block {names[index]!r} was called when {then}. A pipeline needs one pass through the blocks in the order "
        f"of plan.blocks in every step: no block twice, none left out, none in another order. Use pipeline=1 for this "
        f"model, or name other blocks (plan.blocks)."
    )


def _tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
