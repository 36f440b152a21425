"""What a strategy is put together from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

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

    See :class:`~trainwright.strategies.compose.mixed_placement.ServedByRanks`.
    """

    held: tuple[int, int] = (0, 0)
    """Bytes of parameters and of optimizer state that a server of this rank holds."""
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
