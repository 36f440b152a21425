"""Optimizers of a partitioned module."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.strategies.compose.parts.whole_shapes import configured_by_whole_shapes
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.data.optimizers.shared import SharedOptimizers
from trainwright.strategies.state.assemble import Assembly


class CutOptimizers(SharedOptimizers):
    """Optimizers of a module whose parameters differ between ranks."""

    @property
    def typed_layout(self) -> str:
        """See the base class."""
        layout = self._strategy.layout
        sizes = {**layout.sizes, "expert": layout.expert}
        return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)

    @property
    def divides(self) -> bool:
        """See the base class."""
        return bool(self._strategy.is_cut) or super().divides

    def whole_shape(self, name: str, parameter: Tensor) -> torch.Size:
        """See the base class."""
        cut: Cut | None = self._strategy._assembly.cuts.get(name)
        return parameter.shape if cut is None else cut.whole_shape(parameter.shape)

    def _shared_by(self) -> dist.ProcessGroup | None:
        if not self._strategy.is_cut:
            return super()._shared_by()
        groups: LayoutGroups = self._strategy._groups
        return groups.along("shard", "context", "tensor")

    def _build(self, build: Callable[[], None]) -> None:
        """Show all parameters to a pipeline stage's optimizers, then remove those of other stages."""
        module = self._strategy.lightning_module
        cuts = self._strategy._assembly.cuts
        parts = {name: p for name, p in module.named_parameters() if name in cuts}
        shapes = {id(part): cuts[name].whole_shape(part.shape) for name, part in parts.items()}
        engines = self._strategy._engines
        with engines.registered_ghosts() as ghosts, configured_by_whole_shapes(module, shapes):
            build()
        for optimizer in self._strategy.optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [parameter for parameter in group["params"] if parameter not in ghosts]
            for ghost in ghosts & optimizer.state.keys():
                del optimizer.state[ghost]

    def _level_groups(self) -> None:
        """See the base class; adds empty groups where other stages have more groups. A collective."""
        assembly: Assembly = self._strategy._assembly
        if assembly.pipeline is None:
            return
        for optimizer in self._strategy.optimizers:
            mine = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            longest = max(assembly.gathered(mine), key=len)
            for settings in longest[len(mine) :]:
                optimizer.add_param_group({**settings, "params": []})
