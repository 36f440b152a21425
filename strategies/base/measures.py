"""Measurements of a rank's memory, communication and waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from trainwright.strategies.averaging.replica_averaging import Averaging
from trainwright.strategies.contract.communication.meter import CommunicationMeter
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.contract.part import Host, Part
from trainwright.strategies.contract.waits.timeline import StageListener, StageTimeline, listen_to_stages
from trainwright.strategies.contract.waits.waiting import Waits
from trainwright.strategies.state.wrapped_tensors import plain_tensors


@dataclass(frozen=True)
class HeldBytes:
    """Bytes held by one rank, without buffers of collectives.

    Args:
        parameters: parameters, master copies included.
        gradients: gradients.
        optimizer: state of all optimizers.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.parameters + self.gradients + self.optimizer


class MeasuredStrategy(Host, Protocol):
    """A strategy as seen by :class:`Measures`."""

    _parts: list[Part]

    @property
    def averaging(self) -> Averaging: ...

    def _optimized_parameters(self) -> Iterable[Tensor]: ...


class Measures:
    """Measurements of a rank. All except :meth:`held_bytes` require that the strategy is set up.

    Args:
        strategy: see :class:`MeasuredStrategy`.
    """

    def __init__(self, strategy: MeasuredStrategy) -> None:
        self._strategy = strategy

    def held_bytes(self) -> HeldBytes:
        """Return the bytes that this rank holds; shared memory counts once."""
        strategy = self._strategy
        parameters = [*strategy.lightning_module.parameters(), *strategy._optimized_parameters()]
        states = [t for o in self._optimizers for s in o.state.values() for t in s.values() if isinstance(t, Tensor)]
        return HeldBytes(
            parameters=_storage_bytes(parameters) + sum(part.held[0] for part in strategy._parts),
            gradients=_storage_bytes(p.grad for p in parameters if p.grad is not None),
            optimizer=_storage_bytes(states) + sum(part.held[1] for part in strategy._parts),
        )

    @property
    def _optimizers(self) -> Iterable[Optimizer]:
        """The optimizers whose state this rank may hold."""
        return self._strategy.optimizers

    def measure_waits(self) -> Waits:
        """Start to measure how long this rank waits for others, until the caller stops it."""
        return Waits(self._strategy.root_device)

    def measure_communication(self) -> CommunicationMeter:
        """Start to count the bytes this rank sends, by mesh axis and kind of collective, until the caller stops it."""
        return CommunicationMeter(self._strategy.layout, self._strategy.averaging.names)

    @property
    def _stages(self) -> Sequence[Any]:
        """This rank's pipeline stages."""
        return ()

    def pipeline_timeline(self) -> StageTimeline | None:
        """Return a timeline of this rank's pipeline stages, to be started; ``None`` without a pipeline."""
        return StageTimeline(self._stages, self._strategy.root_device) if self._stages else None

    def listen_to_stages(self, listener: StageListener) -> Callable[[], None]:
        """Notify ``listener`` of every operation of this rank's pipeline stages; returns a function that ends it."""
        return listen_to_stages(self._stages, listener)

    def routing_balance(self) -> dict[str, float]:
        """Return how evenly tokens were routed to experts in training since the last call. Synchronizes the device.

        See :meth:`~trainwright.strategies.expert.engine.ExpertParallel.statistics`; empty without expert parallelism.
        No collective.
        """
        return {}


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {}
    for part in (each for tensor in tensors for each in plain_tensors(local_tensor(tensor))):
        storage = (part._values() if part.is_sparse else part).untyped_storage()
        storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())
