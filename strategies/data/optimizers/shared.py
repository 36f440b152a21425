"""The optimizers of a run whose ranks share one copy of the training state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainwright.strategies.data.finetuning import show_parameters_to
from trainwright.strategies.data.optimizers.divided_steps import DividedSteps, OptimizerSharing, optimize_shards
from trainwright.strategies.data.optimizers.owners import Owners
from trainwright.strategies.data.sharding.exchanges import Exchanges


class SharedOptimizers:
    """Gives the user's optimizers this rank's rows of parameters, or whole ones where they need those.

    Args:
        strategy: whose.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._divided: DividedSteps | None = None
        self._hide_parameters: Callable[[], None] = _nothing

    @property
    def _exchanges(self) -> Exchanges:
        found: Exchanges = self._strategy._exchanges
        return found

    @property
    def owners(self) -> Owners | None:
        """Of which parameters one rank has the whole optimizer state; ``None``: all states lie as parameters do."""
        return None if self._divided is None else self._divided.owners

    @property
    def in_words(self) -> str:
        """The layout as it is typed."""
        return f"strategy=zero{self._strategy.stage}"

    @property
    def divides(self) -> bool:
        """Whether another rank holds parameters, or parts of them, that this one does not."""
        mesh: DeviceMesh = self._strategy.mesh
        return mesh.size(mesh.ndim - 1) > 1

    def whole_shape(self, name: str, parameter: Tensor) -> torch.Size:
        """Return the shape of the whole of what an optimizer holds of a parameter."""
        return parameter.shape

    def _shared_by(self) -> dist.ProcessGroup | None:
        """The ranks that share one copy of each parameter; ``None``: there are no others. A collective."""
        mesh: DeviceMesh = self._strategy.mesh
        return mesh.get_group(mesh.ndim - 1)

    def _level_groups(self) -> None:
        """Have all ranks hold as many groups of parameters, after a finetuning callback may have added some."""

    def _build(self, build: Callable[[], None]) -> None:
        build()

    def set_up(self, trainer: Trainer, build: Callable[[], None]) -> None:
        """Build the user's optimizers.

        Args:
            trainer: of the run.
            build: does so, and gives them to the strategy.

        Raises:
            ValueError: for an optimizer that can be given neither rows nor wholes.
        """
        self._build(build)
        strategy, shards = self._strategy, self._exchanges.shards
        self._divided = DividedSteps(
            OptimizerSharing(self.in_words, self.divides, strategy.root_device, self.whole_shape, self._make_owners)
        )
        self._divide()
        for optimizer in strategy.optimizers:
            optimize_shards(optimizer, shards)
        self._divided.attach(strategy.optimizers)
        self._know_held()
        self.hide_parameters()
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._hide_parameters = show_parameters_to(callbacks, strategy.optimizers, shards, self._level_groups)

    def hide_parameters(self) -> None:
        """Show finetuning callbacks what optimizers hold again."""
        self._hide_parameters()

    def exchange(self) -> None:
        """Have optimizers hold shards also where a callback has added a group of the parameters themselves."""
        for optimizer in self._strategy.optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [self._exchanges.optimized(parameter) for parameter in group["params"]]

    def divide_anew(self) -> None:
        """Find out again what is stepped whole, as more is trained now. A collective."""
        self._divide()
        self._know_held()

    def restore(self) -> None:
        """Let optimizers whose step has failed hold what they held before."""
        if self._divided is not None:
            self._divided.restore()

    def _divide(self) -> None:
        assert self._divided is not None
        exchanges = self._exchanges
        both = {name: (p, exchanges.optimized(p)) for name, p in exchanges.named.items()}
        self._divided.divide(self._strategy.optimizers, both)

    def _know_held(self) -> None:
        assert self._divided is not None
        exchanges = self._exchanges
        names: dict[Tensor, str] = {exchanges.optimized(p): name for name, p in exchanges.named.items()}
        wholes = {name: p for name, p in exchanges.named.items() if self._is_whole_here(name, p)}
        self._divided.know(names, wholes)

    def _is_whole_here(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter is whole on every rank, where the optimizer steps it in place."""
        shard = self._exchanges.shards.get(parameter)
        if shard is None or shard.is_offloaded or isinstance(parameter, DTensor):
            return False
        return self.whole_shape(name, parameter) == parameter.shape

    def _make_owners(self) -> Owners | None:
        group, strategy = self._shared_by(), self._strategy
        if group is None:
            return None
        return Owners(
            group, strategy.root_device, lambda n, part: strategy.placement.boxes(n, part), strategy._bucket_bytes
        )


def _nothing() -> None:
    pass
