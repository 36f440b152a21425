"""Optimizers of a partitioned module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.data.optimizers.shared import SharedOptimizers
from trainwright.strategies.state.assemble import Assembly

_SHAPE: Any = Tensor.shape
_OF_SHAPE = {_SHAPE.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__}


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
        configure = module.configure_optimizers

        @wraps(configure)
        def configured() -> Any:
            with _WholeShapes(shapes):
                return configure()

        with engines.registered_ghosts() as ghosts, with_attributes(module, configure_optimizers=configured):
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


class _WholeShapes(TorchFunctionMode):
    """Function mode that answers for parameters as if they were whole, such as for learning rates by fan-in.

    Args:
        shapes: of the whole, by ``id`` of this rank's part.
    """

    def __init__(self, shapes: Mapping[int, torch.Size]) -> None:
        super().__init__()
        self._shapes = shapes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, on an empty whole if it asks for the shape of a part."""
        if func in _OF_SHAPE and id(args[0]) in self._shapes:
            args = (torch.empty(self._shapes[id(args[0])], device="meta"), *args[1:])
        return func(*args, **(kwargs or {}))
