"""Random numbers drawn outside of the blocks, equal on every stage that runs the code.

Every stage runs the code before its blocks, and each stage's own blocks draw too (dropout). Without this, noise added
before the blocks and used after them would differ on the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainwright.strategies.contract.randomness import state as generators


class StepRandomness:
    """Common generator seeds outside of the blocks, and the rank's own generators inside.

    Args:
        device: of the activations.
        from_last: returns a value of the last stage on all ranks, given its description; a collective.
    """

    def __init__(self, device: torch.device, from_last: Callable[[Any, str], Any]) -> None:
        self._device, self._from_last = device, from_last

    # ---- training steps -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a training step: all stages take the last one's generators for code outside of blocks. A collective."""
        self.share()
        self._common, self._counts = generators.random_state(self._device), generators.draw_counts.copy()
        self._seed = int(torch.randint(2**62, ()))

    @contextmanager
    def micro_batch(self, part: int | None) -> Iterator[None]:
        """Run code outside of the blocks inside: of the whole batch (``None``), or of a micro-batch.

        What a micro-batch draws for activations (dropout) differs between micro-batches.
        """
        generators.set_random_state(self._common, self._device)
        generators.restore_draw_counts(self._counts)
        if part is not None:
            torch.manual_seed((self._seed + part) % 2**62)
        yield
        if part is None:
            self._after = generators.random_state(self._device)

    def end(self) -> None:
        """End a training step: all stages whose blocks drew nothing get the last one's generators. A collective."""
        generators.set_random_state(self._of_last(self._after), self._device)
        self.leave()

    def _of_last(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = sorted(state)
        values = self._from_last([state[name] for name in names], "The state of random number generators")
        # Clones: torch reads the state of a generator from the start of a tensor's memory.
        return dict(zip(names, (value.cpu().clone() for value in values), strict=True))

    # ---- evaluation ---------------------------------------------------------------------------------------------

    def share(self) -> None:
        """Take the last stage's torch generators for code outside of the blocks. A collective."""
        self._inside, self._drew_inside = generators.torch_state(self._device), False
        generators.set_torch_state(self._of_last(self._inside), self._device)

    def leave(self, drew: bool = True) -> None:
        """Return to the rank's own torch generators if blocks have advanced them, or code outside drew nothing."""
        if self._drew_inside or not drew:
            generators.set_torch_state(self._inside, self._device)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Use the rank's own torch generators inside."""
        outside = generators.torch_state(self._device)
        generators.set_torch_state(self._inside, self._device)
        try:
            yield
        finally:
            before, self._inside = self._inside, generators.torch_state(self._device)
            self._drew_inside |= any(not torch.equal(before[name], self._inside[name]) for name in before)
            generators.set_torch_state(outside, self._device)
