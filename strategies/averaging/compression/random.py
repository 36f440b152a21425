"""A random part of the numbers, the same places on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.averaging.compression.compressor import GradientCompressor, Shapes, State, num_elements


class RandomK(GradientCompressor):
    """Some of the numbers, drawn anew at each step, are averaged; the others are kept back for later.

    All ranks draw the same places, from the seed and the number of the step, so that places are never sent and the
    values can be averaged by whatever averages dense numbers (random-k with error feedback, arXiv:1809.07599).

    Args:
        ratio: part of the numbers that is averaged, at least one of them.
        inner: what averages them.
        seed: of the places.

    Raises:
        ValueError: if ``ratio`` is not above 0 and at most 1.
    """

    def __init__(self, ratio: float, inner: GradientCompressor, seed: int = 0) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio={ratio} (allowed: above 0, and at most 1, which sends all)")
        self.ratio = ratio
        self.inner = inner
        self.seed = seed

    def new_state(self, shapes: Shapes, ranks: int, device: torch.device) -> State:
        """See :class:`GradientCompressor`; ``"step"`` counts averages."""
        inner = self.inner.new_state([(self._kept(shapes),)], ranks, device)
        return {
            "residual": torch.zeros(num_elements(shapes), device=device),
            "step": torch.zeros((), dtype=torch.int64),
            **{f"inner_{name}": value for name, value in inner.items()},
        }

    def sent_bytes(self, shapes: Shapes, ranks: int) -> int:
        """See :class:`GradientCompressor`."""
        return self.inner.sent_bytes([(self._kept(shapes),)], ranks)

    @torch.no_grad()
    def average(self, flat: Tensor, shapes: Shapes, group: dist.ProcessGroup | None, state: State) -> None:
        """See :class:`GradientCompressor`."""
        residual, kept = state["residual"], self._kept(shapes)
        residual += flat
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + int(state["step"]))
        state["step"] += 1
        places = torch.randperm(flat.numel(), generator=generator)[:kept].to(flat.device)
        values = residual[places]
        residual[places] = 0.0
        inner = {name.removeprefix("inner_"): value for name, value in state.items() if name.startswith("inner_")}
        self.inner.average(values, [(kept,)], group, inner)
        flat.zero_()
        flat[places] = values
        residual.nan_to_num_(0.0, 0.0, 0.0)

    def _kept(self, shapes: Shapes) -> int:
        numel = num_elements(shapes)
        return min(numel, max(1, round(self.ratio * numel)))
