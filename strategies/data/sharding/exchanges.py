"""Shards that optimizers step, with the communication of gradients and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainwright.strategies.contract.precision import named_dtype
from trainwright.strategies.data.options import ZeroOptions, bucket_bytes_for
from trainwright.strategies.data.sharding.reducer import GradientReducer, ParameterPublisher
from trainwright.strategies.state.shards import ParameterShard


class Exchanges:
    """Shards of parameters that optimizers step, and their reducers and publishers.

    Args:
        bucket_bytes: largest bucket.
        options: of the strategy: ``find_unused_parameters`` and ``reduce_dtype``.

    Attributes:
        named: parameters as optimized, by name; during a step the module holds gathered ones.
        shards: of parameters that optimizers see in parts.
        split: those whose parameters are split themselves.
        trained: names of trainable parameters.
        reducers: of gradients, one per mesh.
        publishers: of values, one per mesh.
    """

    def __init__(self, bucket_bytes: int, options: ZeroOptions) -> None:
        self._bucket_bytes, self._options = bucket_bytes, options
        self.named: dict[str, nn.Parameter] = {}
        self.shards: dict[nn.Parameter, ParameterShard] = {}
        self.split: dict[nn.Parameter, ParameterShard] = {}
        self.trained: set[str] = set()
        self.reducers: list[GradientReducer] = []
        self.publishers: list[ParameterPublisher] = []

    def keep_memory(self) -> None:
        """See :meth:`ParameterShard.keep_memory`."""
        with torch.no_grad():
            for shard in self.shards.values():
                shard.keep_memory()

    def choose(
        self,
        named: dict[str, nn.Parameter],
        chosen: Iterable[nn.Parameter],
        mesh_of: Callable[[nn.Parameter], DeviceMesh],
        offload: bool,
    ) -> None:
        """Set the parameters of a module.

        Args:
            named: all of them, by name.
            chosen: those that optimizers see through a :class:`ParameterShard`.
            mesh_of: returns the ranks that train a parameter on different samples.
            offload: keep shards in host memory.
        """
        self.named = named
        self.shards = {p: ParameterShard(p, mesh_of(p), offload) for p in chosen}
        self.split = {p: shard for p, shard in self.shards.items() if isinstance(p, DTensor)}

    def make(self, averages: bool) -> None:
        """Create reducers and publishers of the trainable parameters.

        Args:
            averages: also average over replicas.
        """
        self.detach()
        self.trained = {name for name, p in self.named.items() if p.requires_grad}
        whole = {p: shard for p, shard in self.shards.items() if p not in self.split}
        for mesh in dict.fromkeys(shard.mesh for shard in whole.values()):
            shards = {p: shard for p, shard in whole.items() if shard.mesh == mesh}
            size = sum(p.numel() * p.element_size() for p in shards)
            bucket_bytes = int(bucket_bytes_for(self._bucket_bytes, size))
            find_unused, dtype = self._options.find_unused_parameters, named_dtype(self._options.reduce_dtype)
            self.reducers.append(GradientReducer(shards.values(), mesh, bucket_bytes, find_unused, averages, dtype))
            self.publishers.append(ParameterPublisher(shards, mesh, bucket_bytes))

    def unfreeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make the shards of unfrozen parameters trainable."""
        for parameter in parameters:
            self.optimized(parameter).requires_grad_()

    def optimized(self, parameter: nn.Parameter) -> Tensor:
        """Return the tensor that an optimizer holds in place of a parameter."""
        shard = self.shards.get(parameter)
        return parameter if shard is None else shard.optimized

    def reload(self) -> None:
        """Copy parameter values into offloaded shards."""
        for shard in self.shards.values():
            if shard.is_offloaded:
                shard.optimized_part.copy_(shard.local_part)

    def detach(self) -> None:
        """Remove reducers and publishers."""
        for reducer in self.reducers:
            reducer.detach()
        self.reducers, self.publishers = [], []

    def release(self) -> None:
        """Drop all references to the module."""
        self.detach()
        self.named, self.shards, self.split = {}, {}, {}
