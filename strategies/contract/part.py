"""Components that strategies are composed of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.memory.snapshots import SnapshotReader
from trainwright.checkpoint.read.run_state import RunState
from trainwright.checkpoint.write.save import Content
from trainwright.core.layout import Layout


class Host(Protocol):
    """The strategy as every part sees it; parts that need more define protocols of their own."""

    optimizers: list[Optimizer]

    @property
    def lightning_module(self) -> LightningModule: ...

    @property
    def precision_plugin(self) -> Precision: ...

    @property
    def root_device(self) -> torch.device: ...

    @property
    def layout(self) -> Layout: ...


class Part:
    """One concern of a strategy; all hooks default to no-ops."""

    held: tuple[int, int] = (0, 0)
    """Bytes of parameters and of optimizer states held in addition to the module's."""

    def start(self) -> None:
        """Start training, after any checkpoint is loaded."""

    def conclude(self) -> None:
        """Finish successful training, before the hooks at its end. A collective."""

    def end(self) -> None:
        """End training, whether or not :meth:`conclude` was called."""

    def stop(self) -> None:
        """Release all resources, after an error and at teardown."""

    def weights_changed(self) -> None:
        """Handle weights that were loaded in place."""


class Tables(Part):
    """Embedding tables on parameter servers; none in this base class.

    See :class:`~trainwright.strategies.compose.parts.mixed_placement.ServedByRanks`.
    """

    served_keys: frozenset[str] = frozenset()
    """Checkpoint keys of weights that servers hold instead of the ranks."""

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether servers step ``parameter``, so that ranks neither shard it nor average its gradient."""
        return False

    def find(self, trainer: Trainer) -> None:
        """Find the tables in the module, at the start of setup.

        Raises:
            ValueError: on every rank, for tables that cannot be served.
        """

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that servers can step their part of the user's optimizers.

        Raises:
            ValueError: if they cannot be split between servers and ranks.
        """

    def attach(self, precision: Precision) -> None:
        """Decide clipping and overflows on dense parameters and tables together."""

    def against_steps(self) -> Iterable[str]:
        """Yield reasons why replicas cannot be averaged within Adam's steps."""
        return ()

    def wholes(self) -> Mapping[str, Tensor]:
        """Pull the tables that this rank does not hold, by name. A collective."""
        return {}

    def bring_back(self) -> None:
        """Allocate this rank's tables again, before weights are loaded into them."""

    def joined(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a ``state_dict`` completed with the tables on servers."""
        return {**state, **self.wholes()}


class Replicas(Part):
    """How replicas stay synchronized; this base class averages gradients at every step.

    See :class:`~trainwright.strategies.local_updates.replicas.LocalReplicas`.
    """

    are_independent: bool = False
    """True if replicas step independently. Only then are the hooks of a step called."""
    mesh_axes: tuple[tuple[str, ...], ...] = (("replicate",),)
    """Mesh axes over which gradients are averaged, before the axis that shards the state."""

    def prepare(self, trainer: Trainer) -> None:
        """Run at the start of setup.

        Raises:
            ValueError: for features that do not work while replicas differ.
        """

    def set_up(self, trainer: Trainer) -> None:
        """Run at the end of setup."""

    def average_gradients(self) -> None:
        """Handle the complete gradients of a step on this replica."""

    def stepped(self) -> None:
        """Run after an optimizer step. A collective."""

    def show(self) -> None:
        """Load the synchronized weights into every replica, for validation. A collective."""

    def take_back(self) -> None:
        """Restore this replica's own weights after validation."""

    def boxes(self, boxes: dict[str, TensorParts]) -> dict[str, TensorParts]:
        """Rename entries so that ranks share a key only if they hold the same bytes."""
        return boxes

    def content(self, checkpoint: Mapping[str, Any], complete: bool, make: Callable[..., Content]) -> Content:
        """Build a run state.

        Args:
            checkpoint: Lightning's dict of the run.
            complete: whether weights are this rank's own, see
                :meth:`~trainwright.strategies.state.checkpointing.RunStates.content`.
            make: builds it from ``checkpoint`` and ``complete`` where replicas are equal.
        """
        return make(checkpoint, complete=complete)

    def averaged(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint of the replica averages. A collective."""
        return checkpoint

    def knows(self, of: str) -> bool:
        """Return whether it can load the extra state that strategy ``of`` saved."""
        return False

    def opened(self, state: RunState | SnapshotReader) -> None:
        """Handle the state that the run resumes from."""

    def restore(self) -> None:
        """Run after optimizer states were read from it."""

    def close(self) -> None:
        """Release resources at teardown."""
