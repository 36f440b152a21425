"""The strategies that name one axis: :class:`HybridStrategy` with that axis taking the ranks."""

from __future__ import annotations

from typing import Any

from trainwright.strategies.compose.hybrid import HybridStrategy


class TensorParallelStrategy(HybridStrategy):
    """Each weight of a layer split over ``tensor`` ranks (Megatron-LM, arXiv:1909.08053).

    Args:
        tensor: ranks that split each weight; -1 takes the rest of the world.
        shard: ranks over which ZeRO splits the state; 1 is off.
        **kwargs: see :class:`~trainwright.strategies.compose.hybrid.HybridStrategy`.
    """

    strategy_name = "tensor"

    def __init__(self, *, tensor: int = -1, shard: int = 1, **kwargs: Any) -> None:
        super().__init__(tensor=tensor, shard=shard, **kwargs)


class PipelineStrategy(HybridStrategy):
    """The blocks of the model split over ``pipeline`` ranks, which work on different micro-batches at a time.

    Args:
        pipeline: ranks that hold different stages; -1 takes the rest of the world.
        shard: ranks over which ZeRO splits the state; 1 is off.
        **kwargs: see :class:`~trainwright.strategies.compose.hybrid.HybridStrategy`.
    """

    strategy_name = "pipeline"

    def __init__(self, *, pipeline: int = -1, shard: int = 1, **kwargs: Any) -> None:
        super().__init__(pipeline=pipeline, shard=shard, **kwargs)


class ContextParallelStrategy(HybridStrategy):
    """The sequence of every sample split over ``context`` ranks, attention exact across them.

    Args:
        context: ranks that split the sequence; -1 takes the rest of the world.
        shard: ranks that read different samples and share the state by ZeRO; 1 is off.
        **kwargs: see :class:`~trainwright.strategies.compose.hybrid.HybridStrategy`.
    """

    strategy_name = "context"

    def __init__(self, *, context: int = -1, shard: int = 1, **kwargs: Any) -> None:
        super().__init__(context=context, shard=shard, **kwargs)


class ExpertParallelStrategy(HybridStrategy):
    """The experts of a mixture-of-experts model spread over ranks that read different samples.

    Args:
        expert: ranks that hold different experts, a divisor of ``shard x context``; -1 takes all of them.
        shard: ranks that read different samples and share the other weights by ZeRO; -1 takes the rest of the world.
        **kwargs: see :class:`~trainwright.strategies.compose.hybrid.HybridStrategy`.
    """

    strategy_name = "expert"

    def __init__(self, *, expert: int = -1, shard: int = -1, **kwargs: Any) -> None:
        super().__init__(expert=expert, shard=shard, **kwargs)
