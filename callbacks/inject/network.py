"""A fault of the network: connections between ranks are cut."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.inject.connections import Place, connections, cut_off
from trainwright.callbacks.inject.fault import Fault
from trainwright.checkpoint.exchange.distinct import of_all_ranks


class Partition(Fault):
    """See :func:`trainwright.callbacks.inject.partition`."""

    def __init__(self, ranks: int | Sequence[int], at_step: int, times: int | None) -> None:
        super().__init__(None, at_step, times)
        self.ranks = frozenset([ranks] if isinstance(ranks, int) else ranks)
        self._places: list[Place] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn where the other ranks are. A collective.

        Raises:
            ValueError: if there is nothing to cut.
        """
        super().on_train_start(trainer, pl_module)
        if not set(range(trainer.world_size)) - self.ranks or not self.ranks & set(range(trainer.world_size)):
            raise ValueError(f"{self.sentence} cuts nothing: all {trainer.world_size} rank(s) are on one side.")
        self._places = _places()

    def strikes(self, trainer: Trainer) -> bool:
        """Whether this rank is cut off; the others are told by their ends of the connections."""
        return trainer.global_rank in self.ranks

    def strike(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shut the connections down that lead to the other side."""
        others = [place for rank, place in enumerate(self._places) if rank not in self.ranks]
        own = self._places[trainer.global_rank]
        cut_off(own, others)


def _places() -> list[Place]:
    """Where all ranks are, by rank. A collective."""
    addresses = {end.partition(":")[0] for end, _ in connections(os.getpid()).values()}
    own: Any = (socket.gethostname(), os.getpid(), tuple(sorted(addresses - _LOOPBACK)))
    return [Place(*each) for each in of_all_ranks(own)]


# Of every machine, so it tells none apart.
_LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
