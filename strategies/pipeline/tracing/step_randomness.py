"""Random numbers drawn outside of the blocks, equal on every stage that runs the code.

Every stage runs the code before its blocks, and each stage's own blocks draw too (dropout). Without this, noise added
before the blocks and used after them would differ on the last stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from trainwright.strategies.contract.randomness import state as generators


class StepRandomness:
    """Common generator seeds outside of the blocks, and the rank's own generators inside.

    Args:
        group: ranks of the pipeline.
        device: of the activations.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def seeds(self, count: int) -> list[int]:
        """Return ``count`` seeds, equal on every rank of the pipeline. A collective."""
        drawn = torch.randint(2**62, (count,)).to(self._device)
        dist.broadcast(drawn, group=self._group, group_src=0)
        return [int(seed) for seed in drawn.tolist()]

    def next_seed(self) -> int:
        """Return the first of the next :meth:`seeds`, which are not drawn yet. A collective."""
        with torch.random.fork_rng(devices=[]):
            return self.seeds(1)[0]

    @contextmanager
    def outside(self, seed: int) -> Iterator[None]:
        """Seed the generators inside; afterwards restore them, as advanced by :meth:`block`."""
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
        """Use the rank's own torch generators inside."""
        outside = generators.torch_state(self._device)
        generators.set_torch_state(self._inside, self._device)
        try:
            yield
        finally:
            self._inside = generators.torch_state(self._device)
            generators.set_torch_state(outside, self._device)
