"""Random numbers of a region of the forward that differ between ranks which otherwise draw the same.

Dropout on activations that all tensor ranks hold must drop the same on each; on activations that are split over them
(heads, features, slices of the sequence) it must not repeat the same mask on every part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainwright.strategies.contract.randomness.state import RANK_STRIDE, set_torch_state, torch_state


def draws_randomly(module: nn.Module) -> bool:
    """Whether a part of ``module`` has a dropout, as a module or as a number that its forward reads."""
    return any(
        "drop" in name.lower() and isinstance(value, float) and value > 0
        for part in module.modules()
        for name, value in (*vars(part).items(), *_probability(part))
    )


def _probability(part: nn.Module) -> tuple[tuple[str, object], ...]:
    return (("dropout", float(part.p)),) if isinstance(part, nn.modules.dropout._DropoutNd) else ()


class SplitRandomness:
    """Default generators that draw on a rank of its own between :meth:`enter` and :meth:`leave`.

    The seed inside is one draw of the CPU's generator outside plus the rank. So it is new at every entry, and
    activation checkpointing, which restores the generators outside before it recomputes, gets the same masks again.
    Nothing is sent and no device is waited for.

    Args:
        rank: of the axis along which regions shall differ. The generators outside must agree along it.
    """

    def __init__(self, rank: int) -> None:
        self._offset = rank * RANK_STRIDE
        self._outside: tuple[dict[str, Tensor], torch.device] | None = None

    @property
    def is_inside(self) -> bool:
        """Whether an entered region has not been left."""
        return self._outside is not None

    def enter(self, device: torch.device) -> bool:
        """Draw on a generator of this rank until :meth:`leave`.

        Args:
            device: whose generator is exchanged beside the CPU's.

        Returns:
            ``False`` if a region was entered already: nothing is done, and who was told so must not leave.
        """
        if self._outside is not None:
            return False
        seed = int(torch.randint(2**62, (), device="cpu").item())
        self._outside = torch_state(device), device
        inside = (seed + self._offset) % 2**63
        torch.default_generator.manual_seed(inside)
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(inside)
        return True

    @contextmanager
    def region(self, device: torch.device, draws: bool = True) -> Iterator[None]:
        """Be inside, unless a region was entered already or nothing ``draws``."""
        began = draws and self.enter(device)
        try:
            yield
        finally:
            if began:
                self.leave()

    def leave(self) -> None:
        """Go on where the generators outside were. Does nothing outside of a region."""
        if self._outside is None:
            return
        outside, self._outside = self._outside, None
        set_torch_state(*outside)
