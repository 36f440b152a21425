"""Local SGD: replicas with local optimizer steps, whose parameters are averaged every H steps."""

from __future__ import annotations

from typing import Any

from trainwright.strategies.compose.hybrid import HybridStrategy
from trainwright.strategies.local_updates.options import LocalSGDOptions
from trainwright.strategies.local_updates.replicas import LocalReplicas, attach_replicas
from trainwright.strategies.local_updates.schedule import UpdateSchedule
from trainwright.strategies.local_updates.state import averages, optimizer_tensors


class LocalSGDStrategy(HybridStrategy):
    """Local optimizer steps per replica; parameters are averaged every ``sync_every`` steps (arXiv:1805.09767).

    With ``sync_every=1`` and SGD, momentum included, it is equivalent to DDP.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.local_updates.options.LocalSGDOptions`;
            ``average_optimizer`` multiplies the traffic by the optimizer's states.

    Raises:
        ValueError: if the options contradict each other.
    """

    strategy_name = "local_sgd"
    options_class = LocalSGDOptions
    options: LocalSGDOptions

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_replicas(self, AveragedReplicas(self, self.options))


class AveragedReplicas(LocalReplicas):
    """Replicas whose parameters are averaged every H steps.

    Args:
        strategy: of this replica.
        options: of the strategy.
    """

    def __init__(self, strategy: HybridStrategy, options: LocalSGDOptions) -> None:
        super().__init__(strategy, UpdateSchedule(options.sync_every, warmup_steps=options.warmup_steps))
        self._averages_optimizer = options.average_optimizer

    def _stepped(self, step: int) -> None:
        if self._schedule.due(step) is None:
            return
        self._means.average(self._own())
        if self._averages_optimizer:
            states = averages(optimizer_tensors(self._strategy.optimizers, self._strategy._name_of()))
            self._means.average({key: states[key] for key in self._means.common(list(states))})
        self._publish_all()
        self._is_synced = True

    def _dropped_text(self) -> str:
        return "its replicas' weights and optimizer states were averaged, and each replica's own state is dropped"
