"""Mean and mean square of each module's output, to find the first module that differs.

They are sums over parts, micro-batches and slices of a sequence, hence independent of the split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from trainwright.core.torch_internals import _pytree as pytree

_SUM, _SQUARES, _COUNT, _ORDER = range(4)


class Outputs:
    """Output statistics of modules, recorded within :meth:`listening`.

    Args:
        places: id of a module -> its row in :attr:`table`; others are ignored.
        count: number of rows.

    Attributes:
        table: sum, sum of squares, number of elements of each module's outputs, and the 1-based index of its first
            call, ``(count, 4)``.
    """

    def __init__(self, places: Mapping[int, int], count: int) -> None:
        self._places = places
        self.table = torch.zeros(count, 4, dtype=torch.float64)
        self._calls = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record outputs in a ``with`` block."""
        handle = register_module_forward_hook(self._record)
        try:
            yield
        finally:
            handle.remove()

    def _record(self, module: nn.Module, _: Any, output: Any) -> None:
        place = self._places.get(id(module))
        if place is None or torch._C._current_graph_task_id() != -1:  # recomputation in backward
            return
        row = self.table[place]
        self._calls += 1
        row[_ORDER] = row[_ORDER] or self._calls
        for tensor in pytree.tree_leaves(output):
            if type(tensor) is Tensor and tensor.is_floating_point() and tensor.numel():
                values = tensor.detach().double()
                row[_SUM] += values.sum().cpu()
                row[_SQUARES] += values.square().sum().cpu()
                row[_COUNT] += values.numel()


def first_that_differs(layout: Outputs, plain: Outputs, allowed: float, device: torch.device) -> int | None:
    """Return the row of the first module, in call order, whose outputs differ; ``None``: none. A collective.

    Args:
        layout: of every rank.
        plain: of ranks that ran the module as written; empty on others.
        allowed: relative difference explained by rounding.
        device: for the collective.
    """
    order = plain.table[:, _ORDER].clone() if dist.get_rank() == 0 else torch.zeros(len(plain.table))
    sent = torch.cat([layout.table[:, :3], plain.table[:, :3], order.double()[:, None]], 1).to(device)
    dist.all_reduce(sent)
    sent = sent.cpu()
    one, other, order = sent[:, :3], sent[:, 3:6], sent[:, 6]
    both = (one[:, _COUNT] > 0) & (other[:, _COUNT] > 0)
    (mean, square), (mean_plain, square_plain) = _moments(one), _moments(other)
    size = square_plain.sqrt() + 1e-12
    differs = ((mean - mean_plain).abs() > allowed * size) | (
        (square.sqrt() - square_plain.sqrt()).abs() > allowed * size
    )
    places = torch.nonzero(both & (differs | size.isnan()) & (order > 0)).flatten().tolist()
    return min(places, key=lambda place: float(order[place]), default=None)


def _moments(table: Tensor) -> tuple[Tensor, Tensor]:
    count = table[:, _COUNT].clamp(min=1)
    return table[:, _SUM] / count, table[:, _SQUARES] / count
