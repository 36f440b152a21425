"""The strategies that name one axis: :class:`HybridStrategy` with that axis taking the ranks."""

from __future__ import annotations

from trainwright.strategies.compose.hybrid import HybridStrategy
from trainwright.strategies.compose.one_axis_options import (
    ContextOptions,
    ExpertOptions,
    PipelineOptions,
    TensorOptions,
)


class TensorParallelStrategy(HybridStrategy):
    """Each weight of a layer split over ``tensor`` ranks (Megatron-LM, arXiv:1909.08053).

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.compose.one_axis_options.TensorOptions`.
    """

    strategy_name = "tensor"
    options_class = TensorOptions


class PipelineStrategy(HybridStrategy):
    """The blocks of the model split over ``pipeline`` ranks, which work on different micro-batches at a time.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.compose.one_axis_options.PipelineOptions`.
    """

    strategy_name = "pipeline"
    options_class = PipelineOptions


class ContextParallelStrategy(HybridStrategy):
    """The sequence of every sample split over ``context`` ranks, attention exact across them.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.compose.one_axis_options.ContextOptions`.
    """

    strategy_name = "context"
    options_class = ContextOptions


class ExpertParallelStrategy(HybridStrategy):
    """The experts of a mixture-of-experts model spread over ranks that read different samples.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.compose.one_axis_options.ExpertOptions`.
    """

    strategy_name = "expert"
    options_class = ExpertOptions
