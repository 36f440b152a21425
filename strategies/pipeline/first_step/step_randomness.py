"""Random numbers that code outside of the blocks draws, the same on every stage that runs it.

Every stage runs the code before its blocks, and blocks draw too (dropout), each stage its own. So noise that is added
before the blocks and asked for after them would be another one on the last stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from trainwright.strategies.contract.randomness import state as generators


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
        before = generators.random_state(self._device)
        self._inside = generators.torch_state(self._device)
        generators.seed_all(seed)
        try:
            yield
        finally:
            generators.set_random_state(before, self._device)
            generators.set_torch_state(self._inside, self._device)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Torch's generators are those of the rank."""
        outside = generators.torch_state(self._device)
        generators.set_torch_state(self._inside, self._device)
        try:
            yield
        finally:
            self._inside = generators.torch_state(self._device)
            generators.set_torch_state(outside, self._device)
