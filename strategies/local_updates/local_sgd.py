"""Local SGD: replicas step by themselves, and their parameters are averaged every so many steps."""

from __future__ import annotations

from typing import Any

from trainwright.strategies.compose.hybrid import HybridStrategy
from trainwright.strategies.local_updates.options import LocalSGDOptions
from trainwright.strategies.local_updates.replicas import LocalReplicas, keep_apart
from trainwright.strategies.local_updates.schedule import UpdateSchedule
from trainwright.strategies.local_updates.state import averages, optimizer_tensors


class LocalSGDStrategy(HybridStrategy):
    """Replicas step by themselves; every ``sync_every`` steps their parameters are averaged (arXiv:1805.09767).

    With one step between two averages and SGD, momentum included, it computes what DDP computes.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.local_updates.options.LocalSGDOptions`; with
            ``average_optimizer`` the average of momentum and second moments multiplies what is sent.

    Raises:
        ValueError: if the options contradict each other.
    """

    strategy_name = "local_sgd"
    options_class = LocalSGDOptions
    options: LocalSGDOptions

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        keep_apart(self, AveragedReplicas(self, self.options))


class AveragedReplicas(LocalReplicas):
    """Replicas whose parameters are averaged every so many steps.

    Args:
        strategy: of this replica.
        options: when, and whether optimizer states are averaged, too.
    """

    def __init__(self, strategy: HybridStrategy, options: LocalSGDOptions) -> None:
        super().__init__(strategy, UpdateSchedule(options.sync_every, warmup_steps=options.warmup_steps))
        self._averages_optimizer = options.average_optimizer

    def _stepped(self, step: int) -> None:
        if self._schedule.due(step) is None:
            return
        self._means.take(self._own())
        if self._averages_optimizer:
            states = averages(optimizer_tensors(self._strategy.optimizers, self._strategy._name_of()))
            self._means.take({key: states[key] for key in self._means.common(list(states))})
        self._publish_all()
        self._is_alike = True

    def _left_behind(self) -> str:
        return (
            "the weights and optimizer states of its replicas were averaged, and what each had of its own is left out"
        )
