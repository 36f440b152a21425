"""Options of ``strategy=ddp``."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.strategies.averaging.options import AveragedOptions


@dataclass
class DDPOptions(AveragedOptions):
    """`strategy=ddp`: every rank holds the whole model, gradients are averaged."""

    _target_: str = "trainwright.strategies.data.ddp.DDPStrategy"
    # Search for parameters unused in a step (walks the graph at every step); false = off, such a parameter is an error.
    find_unused_parameters: bool = False

    takes_sparse_gradients = True
    planned_as = "ddp"
