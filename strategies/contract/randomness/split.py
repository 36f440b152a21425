"""Per-rank random numbers within a region of the forward pass.

Dropout on replicated activations must use the same mask on every tensor rank; on split activations (heads, features,
slices of the sequence) masks must differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainwright.core.torch_internals import _disable_current_modes
from trainwright.strategies.contract.randomness.state import RANK_STRIDE, set_torch_state, torch_state


def draws_randomly(module: nn.Module) -> bool:
    """Return whether ``module`` has dropout, as a submodule or as a probability among its attributes."""
    return any(
        "drop" in name.lower() and isinstance(value, float) and value > 0
        for part in module.modules()
        for name, value in (*vars(part).items(), *_probability(part))
    )


def _probability(part: nn.Module) -> tuple[tuple[str, object], ...]:
    return (("dropout", float(part.p)),) if isinstance(part, nn.modules.dropout._DropoutNd) else ()


class SplitRandomness:
    """Default generators with a per-rank seed between :meth:`enter` and :meth:`leave`.

    The seed inside is one draw from the outer CPU generator plus the rank. It is new at every entry, and activation
    checkpointing, which restores the outer generators before it recomputes, reproduces the masks. A region without
    draws leaves the outer generators as they were, so draws outside are those of one process. There is no
    communication and no device synchronization.

    Args:
        rank: along the axis on which regions differ. The outer generators must agree along it.
    """

    def __init__(self, rank: int) -> None:
        self._offset = rank * RANK_STRIDE
        # Device; state before the region, after the draw of its seed, and as the region begins.
        self._outside: tuple[torch.device, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]] | None = None

    def enter(self, device: torch.device) -> bool:
        """Use this rank's seed until :meth:`leave`.

        Args:
            device: whose generator is replaced in addition to the CPU's.

        Returns:
            ``False`` if a region is active already: nothing is done, and the caller must not leave.
        """
        if self._outside is not None:
            return False
        before = torch_state(device)
        seed = int(torch.randint(2**62, (), device="cpu").item())
        drawn = torch_state(device)
        inside = (seed + self._offset) % 2**63
        torch.default_generator.manual_seed(inside)
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(inside)
        self._outside = device, before, drawn, torch_state(device)
        return True

    @contextmanager
    def region(self, device: torch.device, draws: bool = True) -> Iterator[None]:
        """Enter a region for a ``with`` block, unless one is active or ``draws`` is false."""
        entered = draws and self.enter(device)
        try:
            yield
        finally:
            if entered:
                self.leave()

    def leave(self) -> None:
        """Restore the outer generators, past the seed if the region drew. Does nothing outside of a region."""
        if self._outside is None:
            return
        (device, before, drawn, inside), self._outside = self._outside, None
        with _disable_current_modes():  # a planner's tensors have no values
            now = torch_state(device)
            is_unused = all(torch.equal(state, now[name]) for name, state in inside.items())
        set_torch_state(before if is_unused else drawn, device)
