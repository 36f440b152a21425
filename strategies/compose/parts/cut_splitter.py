"""FSDP2 on this rank's part of a partitioned module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from trainwright.strategies.data.sharding.split import Splitter


class CutSplitter(Splitter):
    """Shards experts over fewer ranks than the rest."""

    def _split_within(self, block: nn.Module, options: Mapping[str, Any]) -> None:
        for experts in self._strategy._engines.expert_modules_in(block):
            fully_shard(experts, **{**options, "mesh": self._splitting(self._strategy._expert_mesh)})

    def _options(self, module: nn.Module) -> dict[str, Any]:
        options = super()._options(module)
        if self._strategy.traits.backward_in_step:
            # Gather once per step instead of per micro-batch and direction.
            options["reshard_after_forward"] = False
        return options
