"""Repeated blocks of a module, and materialization of meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from trainwright.strategies.contract.options import StrategyOptions
from trainwright.strategies.plan.blocks import checkpoint_activations, compile_blocks, find_blocks
from trainwright.strategies.plan.deferred import Piece

_PREPARED = "_trainwright_prepared"


class Blocks:
    """Blocks of a module.

    Args:
        options: with patterns, activation checkpointing and compilation.

    Attributes:
        names: of the blocks, in order, after :meth:`prepare`.
    """

    def __init__(self, options: StrategyOptions) -> None:
        self._options = options
        self.names: tuple[str, ...] = ()

    def find(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the blocks of ``module`` by name, in order."""
        return find_blocks(module, self._options.blocks)

    def prepare(self, module: nn.Module, blocks: dict[str, nn.Module]) -> None:
        """Set up activation checkpointing, then compilation, so that the compiler sees the recomputation."""
        self.names, options = tuple(blocks), self._options
        if getattr(module, _PREPARED, False):
            return  # a later run with the same module
        checkpoint_activations(module, options.activation_checkpointing, blocks.values(), options.checkpoint_modules)
        compile_blocks(module, blocks.values(), options.compile)
        object.__setattr__(module, _PREPARED, True)


def fill(
    pieces: Iterable[Piece],
    seed: int,
    real: dict[Tensor, Tensor],
    make: Callable[[nn.Module, str, Tensor, Tensor], Tensor],
) -> None:
    """Replace the meta tensors of ``pieces`` by real ones.

    Args:
        pieces: of the module.
        seed: of initial values, the same on all ranks.
        real: meta tensor -> its replacement, to preserve ties.
        make: returns the real tensor for a module, a name, the meta tensor and its initial value.
    """
    for piece in pieces:
        for owner, name, value in piece.values(seed):
            meta = getattr(owner, name)
            if meta not in real:
                real[meta] = make(owner, name, meta, value)
            holder = owner._parameters if name in owner._parameters else owner._buffers
            holder[name] = real[meta]  # type: ignore[assignment]
