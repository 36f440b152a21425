"""What a rank holds, sends and waits for, measured while somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from trainwright.strategies.averaging.replica_averaging import Averaging
from trainwright.strategies.contract.communication.meter import CommunicationMeter
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.contract.part import Host, Part
from trainwright.strategies.contract.waits.timeline import HearsStages, StageTimeline, listen_to_stages
from trainwright.strategies.contract.waits.waiting import Waits


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that one rank holds now, without buffers of collectives.

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
    """What is measured of a strategy."""

    _parts: list[Part]

    @property
    def averaging(self) -> Averaging: ...

    def _optimized_parameters(self) -> Iterable[Tensor]: ...


class Measures:
    """What a rank holds, sends and waits for. All but :meth:`held_bytes` is asked once the strategy is set up.

    Args:
        strategy: see :class:`MeasuredStrategy`.
    """

    def __init__(self, strategy: MeasuredStrategy) -> None:
        self._strategy = strategy

    def held_bytes(self) -> HeldBytes:
        """Return the bytes that this rank holds now; memory that two tensors share counts once."""
        strategy = self._strategy
        parameters = [*strategy.lightning_module.parameters(), *strategy._optimized_parameters()]
        states = [t for o in strategy.optimizers for s in o.state.values() for t in s.values() if isinstance(t, Tensor)]
        return HeldBytes(
            parameters=_storage_bytes(parameters) + sum(part.held[0] for part in strategy._parts),
            gradients=_storage_bytes(p.grad for p in parameters if p.grad is not None),
            optimizer=_storage_bytes(states) + sum(part.held[1] for part in strategy._parts),
        )

    def measure_waits(self) -> Waits:
        """Begin to measure how long this rank waits for others, until the caller stops it. Free before that."""
        return Waits(self._strategy.root_device)

    def measure_communication(self) -> CommunicationMeter:
        """Begin to count what this rank sends, by mesh axis and kind of collective, until the caller stops it."""
        return CommunicationMeter(self._strategy.layout, self._strategy.averaging.names)

    @property
    def _stages(self) -> Sequence[Any]:
        """This rank's stages of a pipeline."""
        return ()

    def pipeline_timeline(self) -> StageTimeline | None:
        """Return what takes the times at which this rank's stages of a pipeline work; ``None``: there is no pipeline.

        Free until it is started.
        """
        return StageTimeline(self._stages, self._strategy.root_device) if self._stages else None

    def listen_to_stages(self, listener: HearsStages) -> Callable[[], None]:
        """Have ``listener`` told when this rank's stages of a pipeline work; returns how to end that.

        Nothing is told without a pipeline, and it is free while nobody listens.
        """
        return listen_to_stages(self._stages, listener)

    def routing_balance(self) -> dict[str, float]:
        """Return how evenly tokens went to experts in training since the last call; waits for the device.

        No collective. Of :meth:`~trainwright.strategies.expert.engine.ExpertParallel.statistics`; empty where no ranks
        share experts.
        """
        return {}


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        part = local_tensor(tensor)
        storage = (part._values() if part.is_sparse else part).untyped_storage()
        storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())
