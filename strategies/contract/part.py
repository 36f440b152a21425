"""What a strategy is put together from."""

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
    """What every part may read of the strategy that holds it; what else a part reads is in a protocol of its own."""

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
    """One concern of a strategy, which calls it at these moments; each does nothing unless a part says otherwise."""

    held: tuple[int, int] = (0, 0)
    """Bytes of parameters and of optimizer states that it holds beside the module's."""

    def start(self) -> None:
        """Training begins, from what is loaded by now."""

    def conclude(self) -> None:
        """Training has ended well; the hooks that tell so follow. A collective."""

    def end(self) -> None:
        """Training has ended, also where nobody has called :meth:`conclude`."""

    def stop(self) -> None:
        """Leave nothing behind: after an error, and at teardown."""

    def weights_changed(self) -> None:
        """Weights were loaded in place."""


class Tables(Part):
    """The part of a strategy that hands tables of embeddings to parameter servers; this one has none.

    See :class:`~trainwright.strategies.compose.parts.mixed_placement.ServedByRanks`.
    """

    served_keys: frozenset[str] = frozenset()
    """Keys of the weights of a checkpoint that servers hold now, not the ranks."""

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether servers step ``parameter``, so that ranks neither split it nor average its gradient."""
        return False

    def find(self, trainer: Trainer) -> None:
        """Find the tables in the module, at the beginning of setup.

        Raises:
            ValueError: for what cannot be served, on every rank.
        """

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        """Hold the user's optimizers against what servers can step.

        Raises:
            ValueError: if they cannot be split into what servers step and what ranks do.
        """

    def attach(self, precision: Precision) -> None:
        """Let clipping and overflows be decided on dense part and tables together."""

    def against_steps(self) -> Iterable[str]:
        """Why replicas cannot be averaged within Adam's steps, in words."""
        return ()

    def wholes(self) -> Mapping[str, Tensor]:
        """Tables that this rank does not hold now, by name, pulled for it; a collective."""
        return {}

    def bring_back(self) -> None:
        """Let this rank hold its tables again, before weights are loaded into them."""

    def joined(self, state: dict[str, Any]) -> dict[str, Any]:
        """A ``state_dict`` with the tables that servers hold."""
        return {**state, **self.wholes()}


class Replicas(Part):
    """The part of a strategy that keeps replicas apart between steps; these average gradients at every step.

    See :class:`~trainwright.strategies.local_updates.replicas.LocalReplicas`.
    """

    are_apart: bool = False
    """Whether replicas step by themselves. Only then are the moments of a step called."""
    mesh_axes: tuple[tuple[str, ...], ...] = (("replicate",),)
    """Axes of the mesh over which gradients are averaged, before that of the ranks that share one state."""

    def prepare(self, trainer: Trainer) -> None:
        """At the beginning of setup.

        Raises:
            ValueError: for what cannot work while replicas differ.
        """

    def set_up(self, trainer: Trainer) -> None:
        """At the end of setup."""

    def average_gradients(self) -> None:
        """The gradients of a step are complete on this replica."""

    def stepped(self) -> None:
        """An optimizer step was made. A collective."""

    def show(self) -> None:
        """Let every replica hold what the run is to others, for a validation. A collective."""

    def take_back(self) -> None:
        """Let this replica hold its own again, after a validation."""

    def boxes(self, boxes: dict[str, TensorParts]) -> dict[str, TensorParts]:
        """Name what ranks hold, so that only those hold a key which have the same bytes under it."""
        return boxes

    def content(self, checkpoint: Mapping[str, Any], complete: bool, make: Callable[..., Content]) -> Content:
        """Make a run state.

        Args:
            checkpoint: Lightning's dict of the run.
            complete: whether weights are this rank's own, see
                :meth:`~trainwright.strategies.state.checkpointing.RunStates.content`.
            make: makes it where replicas hold the same, from ``checkpoint`` and ``complete``.
        """
        return make(checkpoint, complete=complete)

    def averaged(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint of the means over the replicas. A collective."""
        return checkpoint

    def own_buffers(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return those of a rank's own buffers that are not kept otherwise."""
        return buffers

    def knows(self, of: str) -> bool:
        """Whether it reads what another kind of strategy had saved beside what all read."""
        return False

    def opened(self, state: RunState | SnapshotReader) -> None:
        """A state was opened, from which the run resumes."""

    def restore(self) -> None:
        """Optimizer states were read from it."""

    def close(self) -> None:
        """At teardown."""
