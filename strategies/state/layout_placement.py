"""Who holds what of a run state where ranks hold different parts of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.strategies.state.assemble import Assembly
from trainwright.strategies.state.run_state import boxes_of


class LayoutPlacement:
    """A :class:`~trainwright.strategies.state.run_state.Placement` for modules that are cut.

    Args:
        assembly: where the parts of the module are.
        is_first: whether this is the first rank of all.
        leads_stage: whether this is the first of the ranks that hold the same stage of the pipeline.
    """

    def __init__(self, assembly: Assembly, is_first: bool, leads_stage: bool) -> None:
        self.is_first = is_first
        self._assembly = assembly
        self._leads_stage = leads_stage

    def boxes(self, name: str, tensor: Tensor) -> TensorParts:
        """Boxes of the whole parameter that this rank holds: its rows of its part of every section."""
        held = boxes_of(tensor)
        cut = self._assembly.cuts.get(name)
        return held if cut is None or tensor.dim() == 0 else cut.in_whole(held)

    def writes(self, name: str, is_parameter: bool) -> bool:
        """Of what several stages hold, one writes; of buffers, which may differ, its first rank."""
        return self._assembly.owns(name) and (is_parameter or self._leads_stage)

    def united(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Entries of all stages, in the order of the unmodified module."""
        found: dict[str, Any] = {}
        for stage in reversed(self._assembly.gathered(mine)):  # of two stages, the earlier one speaks
            found.update(stage)
        order = {name: index for index, name in enumerate(dict.fromkeys((*self._assembly.keys, *self._assembly.names)))}
        return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))

    def group_names(self, optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> list[list[str]]:
        """Names of the parameters of each group of ``optimizer`` on all stages together."""
        return self._assembly.group_names(optimizer, name_of)
