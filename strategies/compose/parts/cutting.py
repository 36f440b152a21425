"""Partitioning of the module of a run, after checks and agreement; its parts are sharded, measured and certified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from trainwright.checkpoint.exchange.distinct import broadcast_value
from trainwright.core.config.options import refuse
from trainwright.strategies.base.measures import Measures
from trainwright.strategies.compose.engines import Engines
from trainwright.strategies.compose.rules import averaging_problem, manual_optimization_problems, sync_batchnorm_problem
from trainwright.strategies.contract.groups import LayoutGroups
from trainwright.strategies.contract.randomness.state import random_state, set_random_state
from trainwright.strategies.contract.same_model import broadcast_from_first
from trainwright.strategies.data.sharding.certified import CertifiedShards
from trainwright.strategies.data.sharding.split import Splitter, averaged_copies
from trainwright.strategies.plan.names import parent_of, starred, within
from trainwright.strategies.state.assemble import Assembly

_LAYOUT = "_trainwright_layout"


def cut(strategy: Any, groups: LayoutGroups) -> tuple[Engines, Assembly]:
    """Partition the module of a strategy and the copies that callbacks made of it. A collective.

    Raises:
        ValueError: if it cannot be partitioned so, or was partitioned before.
    """
    module, layout, device = strategy.lightning_module, strategy.layout, strategy.root_device
    _refuse_partitioned(module)
    _refuse_unsupported(strategy, module)
    names, keys = [name for name, _ in module.named_parameters()], list(module.state_dict())
    engines = Engines.of(module, layout, groups, strategy.options, device)
    _broadcast_whole(module, device)
    _synchronize_generators(groups, device)
    engines.apply()
    engines.place_ghosts(lambda tensor: _dtype_of(strategy.precision_plugin, tensor))
    object.__setattr__(module, _LAYOUT, str(layout))
    assembly = Assembly(names, keys, engines.cuts, engines.owners, groups.along("pipeline"), device)
    assembly.split_on_load(module)
    for copy in averaged_copies(module.trainer):
        engines.cut_copy(copy)
        assembly.split_on_load(copy)
    return engines, assembly


def _broadcast_whole(module: nn.Module, device: torch.device) -> None:
    """Broadcast the weights of rank 0, before parts are taken: those elsewhere tensor by tensor, others together."""
    tensors = [t.detach() for t in (*module.parameters(), *module.buffers()) if not t.is_meta and t.numel()]
    is_direct = [tensor.device.type == device.type and tensor.is_contiguous() for tensor in tensors]
    broadcast_from_first(tensor for tensor, direct in zip(tensors, is_direct, strict=True) if direct)
    for tensor, direct in zip(tensors, is_direct, strict=True):
        if not direct:
            sent = tensor.to(device).contiguous()
            dist.broadcast(sent, src=0)
            tensor.copy_(sent)


def _dtype_of(precision: Precision, tensor: Tensor) -> torch.dtype:
    """Return the dtype that the precision gives to a parameter like ``tensor``."""
    probe = nn.Module()
    probe.parameter = nn.Parameter(torch.empty(0, dtype=tensor.dtype), requires_grad=False)
    return next(precision.convert_module(probe).parameters()).dtype


def _synchronize_generators(groups: LayoutGroups, device: torch.device) -> None:
    """Synchronize the generators of ranks that work on the same samples."""
    group = groups.along("pipeline", "context", "tensor")
    if group is not None:
        # Including those of python and numpy, which data sets may draw from.
        set_random_state(broadcast_value(random_state(device), 0, group, device), device)


def _refuse_unsupported(strategy: Any, module: LightningModule) -> None:
    """Raise if callbacks or settings do not support a partitioned module."""
    problems, layout = [], strategy.layout
    if not module.automatic_optimization:
        problems += manual_optimization_problems(layout, strategy.options.sequence_parallel)
    problems += sync_batchnorm_problem(layout) if strategy._layer_sync else []
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging) and layout.expert > 1:
            problems.append(averaging_problem(type(callback).__name__))
    refuse(problems)


def _refuse_partitioned(module: LightningModule) -> None:
    before = getattr(module, _LAYOUT, None)
    if before is not None:
        raise ValueError(
            f"{type(module).__name__} was partitioned for the layout {before} by another strategy and holds only a "
            "part of its parameters. Build the module anew, or keep using the same Trainer."
        )


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


class LayoutMeasures(Measures):
    """Measures of any layout."""

    _strategy: Any

    @property
    def _stages(self) -> Sequence[Any]:
        return self._strategy._engines.pipeline_stages  # type: ignore[no-any-return]

    def routing_balance(self) -> dict[str, float]:
        """See the base class."""
        return self._strategy._engines.routing_balance()  # type: ignore[no-any-return]


class CertifiedParts(CertifiedShards):
    """Certificates of a module partitioned along any axis."""

    def remedy(self, module: str) -> str:
        """See the base class."""
        layout = self._strategy.layout
        if layout.tensor > 1 and layout.pipeline == 1:  # else micro-batches may be the cause
            plan = self._strategy._engines.plan
            split = dict.fromkeys(starred(name) for name in plan.tensor if within(name, parent_of(module) or module))
            whole = ", ".join(f"{name}: none" for name in split)
            if whole:
                return f"Leave it whole: 'strategy.plan.tensor={{{whole}}}', or use tensor=1."
        axes = ("pipeline", "context", "tensor", "expert")
        used = [axis for axis in axes if getattr(layout, axis) > 1]
        return f"Use {' or '.join(f'{axis}=1' for axis in used)}." if used else super().remedy(module)

    def adapts(self) -> bool:
        """See the base class: a pipeline may run the code after the blocks once per batch."""
        return self._strategy._engines.join_micro_batches()  # type: ignore[no-any-return]

    def parts(self) -> tuple[Assembly, dist.ProcessGroup | None]:
        """See the base class."""
        return self._strategy._assembly, self._strategy._groups.along("pipeline", "context", "tensor")
