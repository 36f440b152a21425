"""Weights that FSDP2 gathers in float8, as torchao's linear layers cast them."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainwright.core.torch_internals import FSDPParam
from trainwright.strategies.data.sharding.gathering import all_parameter_groups
from trainwright.strategies.plan.names import joined


class Float8Parameter(FSDPParam):
    """FSDP2 parameter gathered in float8.

    A layer of torchao with one scale per tensor casts its weight at each use; cast before the all-gather, with the
    scale of the whole weight, it has the same bits at a quarter of the bytes. The shard stays in full precision.
    """

    _layer: Any
    _cast: Any = None  # torchao's extension of FSDP2 around the shard's memory

    @classmethod
    def adopt(cls, parameter: Any, layer: nn.Module) -> None:
        """Turn ``parameter``, FSDP2's object for the weight of ``layer``, into this class."""
        parameter.__class__ = cls
        parameter._layer = layer

    @property
    def _sharded_local_tensor(self) -> torch.Tensor:
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        # Padded: ranks must gather equal sizes.
        shard = self._sharded_param_data.view(self.padded_sharded_param_size)
        if self._cast is None or self._cast._tensor.data_ptr() != shard.data_ptr():
            self._cast = WeightWithDynamicFloat8CastTensor(shard, self._layer.linear_mm_config, self.gathered_dtype)
        return self._cast  # type: ignore[no-any-return]

    @property
    def gathered_dtype(self) -> torch.dtype:
        """Of the all-gather."""
        return self._layer.config.cast_config_weight.target_dtype  # type: ignore[no-any-return]

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        """The shard's numbers, as bytes: gloo has no float8."""
        return [each.view(torch.uint8) for each in super().all_gather_inputs]

    def _unflatten_all_gather_outputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(each.view(self.gathered_dtype) for each in super()._unflatten_all_gather_outputs())

    def set_scale(self, scale: torch.Tensor) -> None:
        """Set the scale of the following casts; without it, each computes its own, by an all-reduce."""
        self._sharded_local_tensor._precomputed_scale = scale  # type: ignore[attr-defined]

    def forget_scale(self) -> None:
        """Forget the scale, and the shard's memory, which may be moved."""
        self._cast = None


class Scales:
    """Computes the scales of all weights gathered in float8, by one all-reduce.

    Args:
        root: split by ``fully_shard``.
    """

    def __init__(self, root: nn.Module) -> None:
        self._groups: defaultdict[tuple[Any, torch.dtype], list[Float8Parameter]] = defaultdict(list)
        for each in (each for group in all_parameter_groups(root) for each in group.fsdp_params):
            if isinstance(each, Float8Parameter) and not each.offload_to_cpu:
                self._groups[each.mesh_info.shard_process_group, each.gathered_dtype].append(each)

    @classmethod
    def of(cls, root: nn.Module) -> Scales | None:
        """Return those of ``root``; ``None`` without such weights."""
        found = cls(root)
        return found if found._groups else None

    @torch.no_grad()
    def compute(self) -> None:
        """Compute the scales of the present weights. A collective."""
        from torchao.float8.float8_utils import amax_to_scale

        for (group, dtype), parameters in self._groups.items():
            largest = torch.stack([each._sharded_param_data.abs().amax() for each in parameters])
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            for each, scale in zip(parameters, amax_to_scale(largest, dtype), strict=True):
                each.set_scale(scale)

    def forget(self) -> None:
        """Forget the scales, since weights may change."""
        for each in (each for parameters in self._groups.values() for each in parameters):
            each.forget_scale()


def float8_layers(block: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of torchao, by the name of their weight, that alone use it, with one scale per tensor."""
    uses = Counter(p for part in block.modules() for p in part._parameters.values())
    named = ((joined(name, "weight"), part) for name, part in block.named_modules() if _casts_by_tensor(part))
    return {name: part for name, part in named if uses[part.weight] == 1 and not part.weight._backward_hooks}


def _casts_by_tensor(layer: nn.Module) -> bool:
    torchao = sys.modules.get("torchao.float8.float8_linear")
    if torchao is None or type(layer).forward is not torchao.Float8Linear.forward:
        return False
    config: Any = layer.config
    cast = config.cast_config_weight
    by_tensor = cast.scaling_type.name == "DYNAMIC" and cast.scaling_granularity.name == "TENSORWISE"
    return by_tensor and cast == config.cast_config_weight_for_grad_input and not config.round_scales_to_power_of_2


def gather_in_float8(block: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Gather the weights of some layers in float8.

    Args:
        block: split by ``fully_shard``, possibly with nested modules.
        layers: see :func:`float8_layers`.
    """
    of_weight = {block.get_parameter(name): layer for name, layer in layers.items()}
    for parameter in (each for group in all_parameter_groups(block) for each in group.fsdp_params):
        if parameter.sharded_param in of_weight:
            Float8Parameter.adopt(parameter, of_weight[parameter.sharded_param])
