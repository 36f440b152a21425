"""Peers, service and measures of parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from trainwright.core.run.peers import EndNotice, Peers, ReceivedNotice, Service
from trainwright.strategies.base.measures import HeldBytes, Measures
from trainwright.strategies.contract.same_model import average_buffers


class Workers(Peers):
    """Workers of parameter servers.

    Args:
        strategy: of this rank.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def fit_store(self) -> dist.Store | None:
        """See the base class; while training."""
        client, store = self._strategy.client, self._strategy._store
        return None if client is None or store is None else dist.PrefixStore(client.prefix, store)

    def meet(self) -> None:
        """Wait for all workers, pull parameters unless they were written, and average buffers."""
        strategy, client = self._strategy, self._strategy.client
        if client is None:
            return
        client.settle()
        strategy._served.rest()
        if not strategy.traits.steps_are_collective:
            # Written parameters are the result of a training that ends; if it continues, the next step refuses them.
            strategy._rebuild_process_group(client.meet(keeps=not client.has_pulled_values))
        average_buffers(strategy.lightning_module)

    def tell_of_end(self, notice: Callable[[], EndNotice | None]) -> None:
        """See the base class."""
        if self._strategy.client is not None:
            self._strategy.client.notice = notice

    @property
    def heard_of_end(self) -> ReceivedNotice | None:
        """See the base class."""
        return None if self._strategy.client is None else self._strategy.client.heard


class Servers(Service):
    """Parameter servers, on dedicated ranks or beside the first workers.

    Args:
        strategy: of this rank.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def serves(self) -> bool:
        """See the base class."""
        strategy = self._strategy
        return bool(strategy._server_ranks > 0 and strategy.global_rank >= strategy.world_size)

    def serve(self) -> None:
        """See the base class; frees the module's memory first."""
        self._strategy._serve()

    def server_bytes(self) -> dict[int, int]:
        """See the base class."""
        strategy, served = self._strategy, self._strategy._served
        if served is None:
            return {}
        plan, first = strategy._plan(served), strategy.world_size if strategy._server_ranks else 0
        return {first + server: plan.numel(server) * plan.dtype.itemsize for server in range(strategy.servers)}

    def server_traffic(self) -> dict[int, tuple[int, int]]:
        """See the base class."""
        strategy, client = self._strategy, self._strategy.client
        if not strategy._server_ranks or client is None:
            return {}
        return {strategy.world_size + server: sent for server, sent in enumerate(client.traffic())}


class WorkerMeasures(Measures):
    """Measures of a rank that may run a server."""

    _strategy: Any

    def held_bytes(self) -> HeldBytes:
        """Return the bytes held by this rank, including its server."""
        # The module of a dedicated server rank is on the meta device.
        held = HeldBytes(0, 0, 0) if self._strategy.service.serves else super().held_bytes()
        server = self._strategy.server
        if server is None:
            return held
        parameters, optimizer = server.shard.nbytes
        return HeldBytes(held.parameters + parameters, held.gradients, held.optimizer + optimizer)

    @property
    def _optimizers(self) -> Iterable[Optimizer]:
        return [getattr(optimizer, "optimizer", optimizer) for optimizer in self._strategy.optimizers]
