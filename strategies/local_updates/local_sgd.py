"""Local SGD: replicas step by themselves, and their parameters are averaged every so many steps."""

from __future__ import annotations

from typing import Any

from trainwright.core.config.options import refuse
from trainwright.strategies.local_updates.replicas import LocalUpdateStrategy
from trainwright.strategies.local_updates.rules import (
    compressed_parameters_problem,
)
from trainwright.strategies.local_updates.state import (
    averages,
    optimizer_tensors,
)


class LocalSGDStrategy(LocalUpdateStrategy):
    """Replicas step by themselves; every ``sync_every`` steps their parameters are averaged (arXiv:1805.09767).

    With one step between two averages and SGD, momentum included, it computes what DDP computes.

    Args:
        sync_every: optimizer steps from one average to the next.
        average_optimizer: average what optimizers remember (momentum, second moments), too, which multiplies what is
            sent; ``False``: each replica keeps its own.
        **kwargs: see :class:`LocalUpdateStrategy`.

    Raises:
        ValueError: if the options contradict each other.
    """

    strategy_name = "local_sgd"

    def __init__(self, *, sync_every: int = 10, average_optimizer: bool = False, **kwargs: Any) -> None:
        problem = compressed_parameters_problem(kwargs.pop("compression", None))
        refuse([problem] if problem else [])
        super().__init__(sync_every=sync_every, **kwargs)
        self._averages_optimizer = average_optimizer

    def _stepped(self, step: int) -> None:
        if self._schedule.due(step) is None:
            return
        self._means.take(self._own())
        if self._averages_optimizer:
            states = averages(optimizer_tensors(self.optimizers, self._name_of()))
            self._means.take({key: states[key] for key in self._means.common(list(states))})
        self._publish_all()
        self._is_alike = True

    def _left_behind(self) -> str:
        return (
            "the weights and optimizer states of its replicas were averaged, and what each had of its own is left out"
        )
