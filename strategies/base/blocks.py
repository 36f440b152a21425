"""The repeated blocks of a module, and memory for what was built without."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from trainwright.strategies.contract.options import StrategyOptions
from trainwright.strategies.plan.blocks import checkpoint_activations, compile_blocks, find_blocks
from trainwright.strategies.plan.deferred import Piece

_PREPARED = "_trainwright_prepared"


class Blocks:
    """The blocks of a module.

    Args:
        options: which blocks there are, and what is done to each.

    Attributes:
        names: of the blocks, in order, once they are prepared.
    """

    def __init__(self, options: StrategyOptions) -> None:
        self._options = options
        self.names: tuple[str, ...] = ()

    def find(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the blocks of ``module`` by name, in order."""
        return find_blocks(module, self._options.blocks)

    def prepare(self, module: nn.Module, blocks: dict[str, nn.Module]) -> None:
        """Checkpoint activations, then compile: the order that lets the compiler see the recomputation."""
        self.names, options = tuple(blocks), self._options
        if getattr(module, _PREPARED, False):
            return  # a second fit or a test after fit with the same module
        checkpoint_activations(module, options.activation_checkpointing, blocks.values(), options.checkpoint_modules)
        compile_blocks(module, blocks.values(), options.compile)
        object.__setattr__(module, _PREPARED, True)


def fill(
    pieces: Iterable[Piece],
    seed: int,
    real: dict[Tensor, Tensor],
    make: Callable[[nn.Module, str, Tensor, Tensor], Tensor],
) -> None:
    """Exchange the meta tensors of ``pieces`` for real ones.

    Args:
        pieces: of the module.
        seed: of initial values, the same on all ranks.
        real: what was exchanged, so that ties are kept.
        make: makes the real one of the tensor of a name of a module, from the meta one and its initial value.
    """
    for piece in pieces:
        for owner, name, value in piece.values(seed):
            meta = getattr(owner, name)
            if meta not in real:
                real[meta] = make(owner, name, meta, value)
            holder = owner._parameters if name in owner._parameters else owner._buffers
            holder[name] = real[meta]  # type: ignore[assignment]
