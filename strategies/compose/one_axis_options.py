"""Options of strategies named after one axis: those of ``strategy=hybrid`` with all ranks on it by default."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.core.config.options import number
from trainwright.strategies.compose.hybrid_options import HybridOptions


@dataclass
class TensorOptions(HybridOptions):
    """`strategy=tensor`."""

    _target_: str = "trainwright.strategies.compose.one_axis.TensorParallelStrategy"
    # Ranks that split each weight of a layer; -1 = the rest.
    tensor: int = number(-1, least=-1)
    # Ranks over which ZeRO splits the state; 1 = off.
    shard: int = number(1, least=-1)


@dataclass
class PipelineOptions(HybridOptions):
    """`strategy=pipeline`."""

    _target_: str = "trainwright.strategies.compose.one_axis.PipelineStrategy"
    # Ranks with different stages of the model; -1 = the rest.
    pipeline: int = number(-1, least=-1)
    # Ranks over which ZeRO splits the state; 1 = off.
    shard: int = number(1, least=-1)


@dataclass
class ContextOptions(HybridOptions):
    """`strategy=context`."""

    _target_: str = "trainwright.strategies.compose.one_axis.ContextParallelStrategy"
    # Ranks that split the sequence of the same samples; -1 = the rest.
    context: int = number(-1, least=-1)
    # Ranks that read different samples and share the state by ZeRO; 1 = off.
    shard: int = number(1, least=-1)


@dataclass
class ExpertOptions(HybridOptions):
    """`strategy=expert`."""

    _target_: str = "trainwright.strategies.compose.one_axis.ExpertParallelStrategy"
    # Ranks with different experts, a divisor of shard x context; -1 = all of these.
    expert: int = number(-1, least=-1)
