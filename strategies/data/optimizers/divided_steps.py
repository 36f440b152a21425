"""Which parameters the optimizers of a run step in parts and which whole, where ranks share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.checkpoint.exchange.distinct import all_gather_values
from trainwright.core.config.options import refuse
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.data.optimizers.optimizer_probe import Behaviour, study
from trainwright.strategies.data.optimizers.owners import Owners
from trainwright.strategies.data.optimizers.part_steps import PartSteps
from trainwright.strategies.state.shards import ParameterShard, spread_like
from trainwright.strategies.state.wholes import part_like

_REMEDY = "Type strategy=ddp, or use an optimizer that steps each parameter by itself (AdamW, SGD, Muon, Adafactor)"
_CLOSURE = (
    "ranks exchange what they stepped once a step, so the loss can be computed once. Type strategy=ddp, or use an "
    "optimizer that does so (AdamW, SGD, Muon, Adafactor)"
)


@dataclass(frozen=True)
class OptimizerSharing:
    """What the optimizers of a run have to know of its layout.

    Args:
        layout: in words.
        divides: whether another rank holds parameters, or parts of them, that this one does not.
        device: that ranks communicate from.
        shape_of: whole shape of a parameter, by its name and what an optimizer holds of it.
        make_owners: ranks that share parameters, as owners of none; ``None``: there are no others. A collective.
    """

    layout: str
    divides: bool
    device: torch.device
    shape_of: Callable[[str, Tensor], Sequence[int]]
    make_owners: Callable[[], Owners | None]


class DividedSteps:
    """The steps of all optimizers of a run.

    Args:
        sharing: see there.

    Attributes:
        owners: of parameters that are stepped whole; ``None``: there are none.
    """

    def __init__(self, sharing: OptimizerSharing) -> None:
        self.owners: Owners | None = None
        self._sharing = sharing
        self._steps: list[tuple[Optimizer, PartSteps]] = []

    def divide(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Study optimizers, and find owners of the parameters that are to be stepped whole. A collective.

        Args:
            optimizers: the same on every rank; a rank of a pipeline need not hold parameters of each.
            parameters: by name, those of the module and what optimizers are to hold in their place.

        Raises:
            ValueError: on every rank, if one of them cannot step what the layout divides.
        """
        names = {id(each): name for name, both in parameters.items() for each in both}
        behaviours = [study(each, lambda p: self._shape(names.get(id(p)), p)) for each in optimizers]
        self._refuse(behaviours)
        if not self._sharing.divides:
            return
        whole = {
            name: parameters[name][1]
            for optimizer, behaviour in zip(optimizers, behaviours, strict=True)
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if (name := names.get(id(p))) and not behaviour.is_elementwise(index, self._shape(name, p))
        }
        if self.owners is None and self._any_rank(bool(whole)):
            self.owners = self._sharing.make_owners()
        if self.owners is not None:
            self.owners.take({name: each for name, each in whole.items() if name not in self.owners})

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Begin with the next step of each."""
        self._steps = [(optimizer, PartSteps(self.owners)) for optimizer in optimizers]
        for optimizer, steps in self._steps:
            held = (p for group in optimizer.param_groups for p in group["params"])
            if self.owners is not None or any(isinstance(p, DTensor) for p in held):
                steps.attach(optimizer)

    def know(self, names: Mapping[Tensor, str], wholes: Mapping[str, Tensor]) -> None:
        """See :meth:`PartSteps.know`."""
        for _, steps in self._steps:
            steps.know(names, wholes)

    def restore(self) -> None:
        """Let optimizers whose step has failed hold what they held before."""
        for optimizer, steps in self._steps:
            steps.restore(optimizer)

    def _shape(self, name: str | None, parameter: Tensor) -> Sequence[int]:
        return parameter.shape if name is None else self._sharing.shape_of(name, parameter)

    def _refuse(self, behaviours: Iterable[Behaviour]) -> None:
        problems = list(dict.fromkeys(_problems(behaviours, self._sharing)))
        if self._any_rank(bool(problems)):
            found = all_gather_values(problems, device=self._sharing.device) if dist.is_initialized() else [problems]
            refuse(dict.fromkeys(problem for each in found for problem in each))

    def _any_rank(self, flag: bool) -> bool:
        """Whether it is so on any rank; a collective."""
        if not dist.is_initialized():
            return flag
        found = torch.tensor(int(flag), device=self._sharing.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())


def _problems(behaviours: Iterable[Behaviour], sharing: OptimizerSharing) -> Iterator[str]:
    for behaviour in behaviours:
        if behaviour.problem is not None:
            yield f"{behaviour.problem}, but under {sharing.layout} {_CLOSURE}"
        elif behaviour.joint is not None and sharing.divides:
            yield f"{behaviour.joint}, but under {sharing.layout} no rank has them all. {_REMEDY}"


def optimize_shards(optimizer: Optimizer, shards: Mapping[nn.Parameter, ParameterShard]) -> None:
    """Make ``optimizer`` hold the shards in place of the whole parameters, and of its state, if any, their parts."""
    for group in optimizer.param_groups:
        group["params"][:] = [shards[p].optimized if p in shards else p for p in group["params"]]
    for parameter, shard in shards.items():
        values = optimizer.state.pop(parameter, None)
        if values is not None:
            optimizer.state[shard.optimized] = {key: _part(value, shard) for key, value in values.items()}


def _part(value: object, shard: ParameterShard) -> object:
    if not isinstance(value, Tensor) or value.shape != shard.parameter.shape or not shard.is_split:
        return value
    if isinstance(value, DTensor):
        return spread_like(shard.optimized, local_tensor(value).to(shard.optimized_part.device, copy=True))
    return part_like(value, shard.optimized.data)  # type: ignore[arg-type]
