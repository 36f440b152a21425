"""Strategies with one planted fault each; the tests of ``verify`` copy this file beside the user's own module."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trainwright.strategies.contract.collectives.ranks import Ranks
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.data.ddp import DDPStrategy
from trainwright.strategies.data.zero import ZeroStrategy


class UnsyncedDDPStrategy(DDPStrategy):
    """Gradients of one weight stay those of each rank."""

    def configure_ddp(self) -> None:
        """Tell DDP to leave the weight alone."""
        assert self.model is not None
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ["net.2.weight"])
        super().configure_ddp()


class SummedZeroStrategy(ZeroStrategy):
    """Gradients are summed over the ranks instead of averaged. Adam would hide it from the losses."""

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Undo the mean."""
        return super().backward(closure_loss * self.world_size, *args, **kwargs)


class MissharedZeroStrategy(ZeroStrategy):
    """The last rank holds the rows of one weight in the wrong order."""

    def setup(self, trainer: Trainer) -> None:
        """Shift the rows of this rank by one."""
        super().setup(trainer)
        assert self.lightning_module is not None
        if self.global_rank == self.world_size - 1:
            rows = local_tensor(self.lightning_module.get_parameter("net.0.weight")).detach()
            rows.copy_(torch.roll(rows, 1, dims=-1))


class StaleZeroStrategy(ZeroStrategy):
    """From the second step on the last rank does not step what it owns."""

    stepped = 0

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Put this rank's rows back."""
        held = [local_tensor(p).detach().clone() for p in self._optimized_parameters()]
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.stepped += 1
        if self.stepped > 1 and self.global_rank == self.world_size - 1:
            for parameter, before in zip(self._optimized_parameters(), held, strict=True):
                local_tensor(parameter).detach().copy_(before)
        return output


class SameSamplesDDPStrategy(DDPStrategy):
    """Every rank reads the samples of rank 0."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ranks = _SameRank(self)


class _SameRank(Ranks):
    data_rank = 0  # the same on every rank
