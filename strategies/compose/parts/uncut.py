"""The engines of a module that is not cut."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn

from trainwright.strategies.contract.cuts import Cut
from trainwright.strategies.expert.engine import Dispatcher
from trainwright.strategies.pipeline.stage import OwnForwardStage
from trainwright.strategies.plan.model_plan import ModelPlan


class Uncut:
    """The engines of a module that is not cut: each rank runs all of it."""

    module: LightningModule | None = None
    """The module that is cut; ``None``: no module is."""
    is_cut = False
    plan = ModelPlan()
    num_parameters = 0
    """Elements of all parameters of the module before it was cut; 0: of none."""

    @property
    def has_pipeline(self) -> bool:
        """See :attr:`~trainwright.strategies.compose.engines.Engines.has_pipeline`."""
        return False

    @property
    def pipeline_stages(self) -> list[OwnForwardStage]:
        """See :attr:`~trainwright.strategies.compose.engines.Engines.pipeline_stages`."""
        return []

    @property
    def dispatchers(self) -> tuple[Dispatcher, ...]:
        """See :attr:`~trainwright.strategies.compose.engines.Engines.dispatchers`."""
        return ()

    @property
    def expert_parameters(self) -> set[nn.Parameter]:
        """See :attr:`~trainwright.strategies.compose.engines.Engines.expert_parameters`."""
        return set()

    def micro_batches_of(self, batch: Any) -> list[tuple[Any, float]]:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.micro_batches_of`."""
        return [(batch, 1.0)]

    def registered_ghosts(self) -> AbstractContextManager[set[nn.Parameter]]:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.registered_ghosts`."""
        return nullcontext(set())

    def routing_balance(self) -> dict[str, float]:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.routing_balance`."""
        return {}

    def holds(self, name: str) -> bool:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.holds`."""
        return True

    def cut_of(self, owner: nn.Module, name: str) -> Cut | None:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.cut_of`."""
        return None

    def expert_modules_in(self, block: nn.Module) -> list[nn.Module]:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.expert_modules_in`."""
        return []

    def shared_parameters(self) -> dict[dist.ProcessGroup, list[nn.Parameter]]:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.shared_parameters`."""
        return {}

    def kin_of(self, name: str) -> str:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.kin_of`."""
        return ""

    def parts_of(self, name: str) -> int:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.parts_of`."""
        return 1

    def guard(self, function: Callable[[], Any]) -> Any:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.guard`."""
        return function()

    def refresh(self) -> None:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.refresh`."""

    def share_buffers(self) -> None:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.share_buffers`."""

    def detach(self) -> None:
        """See :meth:`~trainwright.strategies.compose.engines.Engines.detach`."""
