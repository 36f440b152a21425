"""Embeddings that fetch the rows of a batch from a remote table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Embedding = nn.Embedding | nn.EmbeddingBag
# Returns rows ``(k, dim)`` of a table, given ascending row indices, int64 ``(k,)``.
Source = Callable[[nn.Parameter, Tensor], Tensor]


def has_standard_forward(part: Embedding) -> bool:
    """Return whether an embedding has torch's forward, which reads the rows of its input only."""
    return type(part).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward)


class Lookups:
    """Embeddings of some tables.

    Args:
        module: that has them.
        tables: their weights.
    """

    def __init__(self, module: nn.Module, tables: Sequence[nn.Parameter]) -> None:
        ids = {id(table) for table in tables}
        self._parts = [p for p in module.modules() if isinstance(p, Embedding) and id(p.weight) in ids]
        self.running = False
        """True if rows come from a source."""

    def begin(self, source: Source) -> None:
        """Free the tables and fetch rows from ``source``; gradients become sparse."""
        for part in self._parts:
            table: Any = part.weight
            # NaN, so that other reads are noticed.
            table.data = torch.full((), torch.nan, dtype=table.dtype, device=table.device).expand(table.shape)
            part.__dict__["forward"] = partial(_forward, part, source)
        self.running = True

    def end(self) -> None:
        """Read local tables again."""
        for part in self._parts:
            part.__dict__.pop("forward", None)
        self.running = False


@torch.compiler.disable
def _forward(part: Embedding, source: Source, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    table: Any = part.weight
    numbers, places = torch.unique(ids, return_inverse=True)
    numbers = numbers.long()
    if numbers.numel() and not 0 <= int(numbers[0]) <= int(numbers[-1]) < part.num_embeddings:
        raise IndexError(
            f"index out of range: rows {int(numbers[0])} to {int(numbers[-1])} of a table of {part.num_embeddings}"
        )
    rows = source(table, numbers)
    if torch.is_grad_enabled() and table.requires_grad:
        rows.requires_grad_()
        rows.register_post_accumulate_grad_hook(partial(_hand_over, table, numbers))
    return _look_up(part, rows, places, _place_of(numbers, part.padding_idx), *args, **kwargs)


def _look_up(
    part: Embedding,
    rows: Tensor,
    places: Tensor,
    padding: int | None,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    by_frequency = part.scale_grad_by_freq
    if isinstance(part, nn.Embedding):
        return F.embedding(places, rows, padding, scale_grad_by_freq=by_frequency)
    return F.embedding_bag(
        places,
        rows,
        offsets,
        scale_grad_by_freq=by_frequency,
        mode=part.mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=part.include_last_offset,
        padding_idx=padding,
    )


def _place_of(numbers: Tensor, row: int | None) -> int | None:
    """Return the position of a row among the fetched ones, or ``None``."""
    if row is None:
        return None
    found = (numbers == row).nonzero()
    return int(found[0]) if len(found) else None


def _hand_over(table: nn.Parameter, numbers: Tensor, rows: Tensor) -> None:
    """Add the gradient of rows to that of their table, as a sparse tensor."""
    assert rows.grad is not None
    gradient = torch.sparse_coo_tensor(numbers[None], rows.grad, table.shape, is_coalesced=True)
    rows.grad = None
    table.grad = gradient if table.grad is None else (table.grad + gradient).coalesce()
