"""PowerSGD: low-rank compression of gradient matrices (arXiv:1905.13727)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.averaging.compression.compressor import (
    GradientCompressor,
    Shapes,
    State,
    TwoPhase,
    num_elements,
    ring_bytes,
)


@dataclass(frozen=True)
class _Matrix:
    """Tensor of a bucket that is sent as two low-rank factors.

    Args:
        start: offset in the bucket.
        rows: its first dim.
        columns: product of its other dims.
        rank: of the factors.
    """

    start: int
    rows: int
    columns: int
    rank: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


class PowerSGD(GradientCompressor):
    """Algorithm 2 of the paper, with subspace iteration warm-started from the previous step.

    Each gradient ``M``, ``(rows, columns)``, is sent as ``M Q`` and ``M^T P``, each averaged by an all-reduce. Tensors
    of one dim, or hardly shortened, are sent uncompressed. The error is added to the next gradient.

    Args:
        rank: of the factors, at least 1.
        least_gain: tensors shortened by less than this factor, at least 1, are sent uncompressed.
        iterations: subspace iterations per average, at least 1, each of which sends both factors.
        inner: compressor of the factors, without feedback, such as a cast. ``None``: a float32 all-reduce.
    """

    def __init__(self, rank: int, least_gain: float = 2.0, iterations: int = 1, inner: TwoPhase | None = None) -> None:
        self.rank, self.least_gain, self.iterations, self.inner = rank, least_gain, iterations, inner

    def new_state(self, shapes: Shapes, ranks: int, device: torch.device) -> State:
        """See :class:`GradientCompressor`; ``"basis"`` is equal on all ranks."""
        matrices, _ = self._parts(shapes)
        # A generator of its own: equal on all ranks, and no effect on other random numbers.
        generator = torch.Generator().manual_seed(20190531)
        bases = torch.randn(sum(each.columns * each.rank for each in matrices), generator=generator)
        return {"residual": torch.zeros(num_elements(shapes), device=device), "basis": bases.to(device)}

    def sent_bytes(self, shapes: Shapes, ranks: int) -> int:
        """See :class:`GradientCompressor`."""
        matrices, rest = self._parts(shapes)
        first = sum(each.rows * each.rank for each in matrices)
        second = sum(each.columns * each.rank for each in matrices)
        others = sum(piece.stop - piece.start for piece in rest)
        messages = [first, second] * self.iterations
        if self.inner is None:
            messages[-1] += others  # in one message
            return sum(ring_bytes(numel, ranks) for numel in messages if numel)
        factors = sum(self.inner.sent_bytes([(numel,)], ranks) for numel in messages if numel)
        return factors + (ring_bytes(others, ranks) if others else 0)

    @torch.no_grad()
    def average(self, flat: Tensor, shapes: Shapes, group: dist.ProcessGroup | None, state: State) -> None:
        """See :class:`GradientCompressor`."""
        matrices, rest = self._parts(shapes)
        residual = state["residual"]
        residual += flat
        sizes = [(each.columns, each.rank) for each in matrices]
        bases = _split(state["basis"], sizes)
        second: list[Tensor] = []
        for _ in range(self.iterations):
            bases = self._averaged(second, group) if second else bases
            products = self._products(matrices, residual, bases, group)
            second = [each.of(residual).T @ product for each, product in zip(matrices, products, strict=True)]
        others = [residual[piece] for piece in rest]
        if self.inner is None:
            second = self._averaged([*second, *others], group)  # in one message
        else:
            second = [*self._averaged(second, group), *self._averaged(others, group, exactly=True)]
        kept = _split(state["basis"], sizes)
        for each, product, basis, new in zip(matrices, products, kept, second, strict=False):
            each.of(flat).copy_(product @ new.T)
            basis.copy_(new)
        for piece, mean in zip(rest, second[len(matrices) :], strict=True):
            flat[piece] = mean
            residual[piece] = mean  # sent whole
        residual -= flat
        residual.nan_to_num_(0.0, 0.0, 0.0)
        state["basis"].nan_to_num_(0.0, 0.0, 0.0)

    def _products(
        self, matrices: Sequence[_Matrix], of: Tensor, bases: Sequence[Tensor], group: dist.ProcessGroup | None
    ) -> list[Tensor]:
        """Return the means of ``M Q`` over ranks, orthonormalized."""
        products = [each.of(of) @ basis for each, basis in zip(matrices, bases, strict=True)]
        return [torch.linalg.qr(each)[0] for each in self._averaged(products, group)]

    def _averaged(
        self, tensors: Sequence[Tensor], group: dist.ProcessGroup | None, exactly: bool = False
    ) -> list[Tensor]:
        """Return the means of tensors over ranks, in one message."""
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if self.inner is not None and not exactly:
            self.inner.average(flat, [tuple(flat.shape)], group, {})
        else:
            dist.all_reduce(flat, group=group)
            flat /= dist.get_world_size(group)
        return _split(flat, [tuple(tensor.shape) for tensor in tensors])

    def _parts(self, shapes: Shapes) -> tuple[list[_Matrix], list[slice]]:
        """Return the tensors sent as factors, and the slices of the others."""
        matrices, rest, start = [], [], 0
        for shape in shapes:
            numel, rows = math.prod(shape), shape[0] if len(shape) > 1 else 1
            columns = numel // max(rows, 1)
            rank = min(self.rank, rows, columns)
            if len(shape) > 1 and numel >= self.least_gain * rank * (rows + columns) > 0:
                matrices.append(_Matrix(start, rows, columns, rank))
            elif numel:
                rest.append(slice(start, start + numel))
            start += numel
        return matrices, rest


def _split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
