"""Comparison of the ranks' shards with the weights that the module was built with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.base.certificate.sketch import PROJECTIONS, WIDTH, sketch_of_part, sketch_of_whole
from trainwright.strategies.base.certificate.written import AsWritten

# Relative to the norm of a parameter; weights are copied, or rounded to at least 8 bits of precision.
_ALLOWED = 2e-2


def sketches_of_wholes(written: AsWritten) -> Tensor:
    """Return sketches of all parameters before sharding, ``(parameters, 9)``."""
    rows = [sketch_of_whole(each.name, getattr(*each.slots[0])) for each in written.parameters]
    return torch.stack(rows) if rows else torch.zeros(0, WIDTH, dtype=torch.float64)


def parts_that_differ(strategy: Any, written: AsWritten, wholes: Tensor) -> str:
    """Return the first parameter whose shards differ from the first rank's weights; empty: none. A collective.

    Args:
        strategy: set up.
        written: of its module.
        wholes: from :func:`sketches_of_wholes` on this rank.
    """
    assembly, _ = strategy.certified.parts()
    parts = torch.zeros_like(wholes)
    for row, each in enumerate(written.parameters):
        held = strategy.certified.held(each.name)
        if held is not None:
            parts[row] = sketch_of_part(each.name, each.shape, held, assembly.cuts.get(each.name))
    wholes, parts = wholes.to(strategy.root_device), parts.to(strategy.root_device)
    dist.broadcast(wholes, src=0)
    dist.all_reduce(parts)
    wholes, parts = wholes.cpu(), parts.cpu()
    copies = (parts[:, -1] / wholes[:, -1].clamp(min=1)).clamp(min=1e-9)
    distances = (parts[:, :PROJECTIONS] / copies[:, None] - wholes[:, :PROJECTIONS]).square().mean(1).sqrt()
    norms = wholes[:, :PROJECTIONS].square().mean(1).sqrt()
    wrong = [i for i, excess in enumerate((distances - _ALLOWED * norms - 1e-6).tolist()) if excess > 0]
    return written.parameters[wrong[0]].name if wrong else ""
