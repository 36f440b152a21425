"""Strategies named after one axis: :class:`HybridStrategy` with all ranks on it by default."""

from __future__ import annotations

from trainwright.strategies.compose.hybrid import HybridStrategy
from trainwright.strategies.compose.hybrid_options import ContextOptions, ExpertOptions, PipelineOptions, TensorOptions


class TensorParallelStrategy(HybridStrategy):
    """Each weight of a layer split over ``tensor`` ranks (Megatron-LM, arXiv:1909.08053).

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.compose.hybrid_options.TensorOptions`.
    """

    strategy_name = "tensor"
    options_class = TensorOptions


class PipelineStrategy(HybridStrategy):
    """Blocks of the model split over ``pipeline`` ranks, which work on different micro-batches at a time.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.compose.hybrid_options.PipelineOptions`.
    """

    strategy_name = "pipeline"
    options_class = PipelineOptions


class ContextParallelStrategy(HybridStrategy):
    """Sequence of every sample split over ``context`` ranks, with exact attention.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.compose.hybrid_options.ContextOptions`.
    """

    strategy_name = "context"
    options_class = ContextOptions


class ExpertParallelStrategy(HybridStrategy):
    """Experts of a mixture-of-experts model spread over ranks that read different samples.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.compose.hybrid_options.ExpertOptions`.
    """

    strategy_name = "expert"
    options_class = ExpertOptions
