"""Strategies that choose how gradients are averaged over replicas, where nothing compresses them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from trainwright.core.config.options import refuse
from trainwright.strategies.averaging.advised import AdvisedCommunication
from trainwright.strategies.averaging.means import MeansOfCopies
from trainwright.strategies.contract.communication.advice import Way, fastest_way
from trainwright.strategies.contract.communication.meter import CommunicationMeter
from trainwright.strategies.contract.communication.options import (
    ALL_REDUCE,
    average_misfits,
    copies_of_a_node,
)
from trainwright.strategies.contract.communication.probe import probe_ways


class AveragedReplicas(AdvisedCommunication):
    """Mixin: gradients of replicas may be averaged in parts, or in two levels over the borders of nodes.

    Args:
        **kwargs: options, see :class:`~trainwright.strategies.averaging.options.AveragedOptions`.

    Raises:
        ValueError: if the options contradict each other; once the ranks have met, if nodes do not fit the layout.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._asked_average = self.options.average_by
        self._average_by = self._asked_average or ALL_REDUCE
        self._of_copies: MeansOfCopies | None = None
        self._ways: list[Way] = []

    # ---- what others may read -------------------------------------------------------------------------------------

    @property
    def average_by(self) -> str:
        """How gradients are averaged over replicas; with ``communication="auto"`` known once set up."""
        return self._average_by

    def measure_communication(self) -> CommunicationMeter:
        """See :meth:`~trainwright.strategies.base.strategy.LayoutStrategy.measure_communication`.

        What averages in two levels send counts under ``replicate-within`` and ``replicate-across``.
        """
        return CommunicationMeter(self.layout, {} if self._of_copies is None else self._of_copies.names)

    # ---- setup ----------------------------------------------------------------------------------------------------

    def _know_nodes(self) -> None:
        """Hold what was asked for against the layout; to be called when the ranks have met.

        Raises:
            ValueError: if nodes do not fit the layout.
        """
        layout = self.layout
        refuse(average_misfits(self._asked_average, self.ranks_per_node, layout))
        self._of_copies = None
        if layout.replicate > 1 and dist.is_initialized() and layout.world_size == dist.get_world_size():
            copies = copies_of_a_node(layout, self.ranks_per_node)
            self._of_copies = MeansOfCopies(layout.groups("replicate"), copies)

    def _choose_average(self, num_bytes: float) -> None:
        """Take the fastest way for so many bytes of gradients, and say so; a collective of all ranks."""
        assert self._of_copies is not None
        self._ways = probe_ways({way: self._of_copies.by(way) for way in self._of_copies.ways}, self.root_device)
        chosen = fastest_way(self._ways, num_bytes)
        self._average_by = chosen.name
        times = ", ".join(f"{way.name} {way.seconds(num_bytes) * 1e3:.3g} ms" for way in self._ways)
        self._changed = (
            f"communication=auto averages by {chosen.name}: predicted for {num_bytes / 2**20:.3g} MiB are {times}."
        )
        rank_zero_info(self._changed)
