"""Random numbers that code outside of the blocks draws, the same on every stage that runs it.

Every stage runs the code before its blocks, and blocks draw too (dropout), each stage its own. So noise that is added
before the blocks and asked for after them would be another one on the last stage.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.contract.randomness.state import random_state, set_random_state


class StepRandomness:
    """Generators with a common seed outside of the blocks, and those of the rank inside.

    Args:
        group: ranks of the pipeline.
        device: of the activations.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def seeds(self, count: int) -> list[int]:
        """As many seeds, the same on every rank of the pipeline. A collective."""
        drawn = torch.randint(2**62, (count,)).to(self._device)
        dist.broadcast(drawn, group=self._group, group_src=0)
        return [int(seed) for seed in drawn.tolist()]

    @contextmanager
    def outside(self, seed: int) -> Iterator[None]:
        """Generators begin from ``seed``, and go on afterwards where they were, or :meth:`block` has left them."""
        before = random_state(self._device)
        self._inside = self._drawn()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            set_random_state(before, self._device)
            self._go_on(self._inside)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Torch's generators are those of the rank."""
        outside = self._drawn()
        self._go_on(self._inside)
        try:
            yield
        finally:
            self._inside = self._drawn()
            self._go_on(outside)

    def _drawn(self) -> tuple[Tensor, Tensor | None]:
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _go_on(self, states: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], self._device)
