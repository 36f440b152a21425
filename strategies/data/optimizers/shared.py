"""Optimizers of ranks that share one copy of the training state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.checkpoint.exchange.distinct import all_gather_values, any_of_ranks
from trainwright.core.config.options import refuse
from trainwright.strategies.base.optimizer_probe import Behaviour, study
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.data.optimizers.owners import Owners
from trainwright.strategies.data.optimizers.part_steps import PartSteps
from trainwright.strategies.data.sharding.exchanges import Exchanges
from trainwright.strategies.data.sharding.originals import Originals
from trainwright.strategies.state.shards import ParameterShard, spread_like
from trainwright.strategies.state.wholes import part_like

_FINETUNING_HOOKS = ("on_fit_start", "on_train_epoch_start")
_REMEDY = "Type strategy=ddp, or use an optimizer that steps each parameter by itself (AdamW, SGD, Muon, Adafactor)"
_CLOSURE = (
    "ranks exchange updates once per step, so the loss can be computed once only. Type strategy=ddp, or use an "
    "optimizer that does so (AdamW, SGD, Muon, Adafactor)"
)


class SharedOptimizers:
    """Builds the user's optimizers on this rank's parts of parameters, or on whole ones where updates need them.

    Args:
        strategy: that owns the optimizers.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.owners: Owners | None = None
        """Owners of parameters that are stepped whole; ``None``: all states are split as parameters are."""
        self._steps: list[tuple[Optimizer, PartSteps]] = []
        self._hide_parameters: Callable[[], None] = lambda: None

    @property
    def _exchanges(self) -> Exchanges:
        return self._strategy._exchanges  # type: ignore[no-any-return]

    @property
    def typed_layout(self) -> str:
        """The layout, as typed."""
        return f"strategy=zero{self._strategy.stage}"

    @property
    def divides(self) -> bool:
        """True if other ranks hold parameters, or parts of them, that this one does not."""
        mesh: DeviceMesh = self._strategy.mesh
        return mesh.size(mesh.ndim - 1) > 1

    def whole_shape(self, name: str, parameter: Tensor) -> torch.Size:
        """Return the whole shape of the tensor that an optimizer holds of a parameter."""
        return parameter.shape

    def _shared_by(self) -> dist.ProcessGroup | None:
        """Return the ranks that share one copy of each parameter; ``None``: there are no others. A collective."""
        mesh: DeviceMesh = self._strategy.mesh
        return mesh.get_group(mesh.ndim - 1)

    def _level_groups(self) -> None:
        """Add empty parameter groups so that all ranks have equally many, after finetuning callbacks."""

    def _build(self, build: Callable[[], None]) -> None:
        build()

    def set_up(self, trainer: Trainer, build: Callable[[], None], originals: Originals) -> None:
        """Build the user's optimizers.

        Args:
            trainer: of the run.
            build: builds them and gives them to the strategy.
            originals: parameters that an optimizer of the user may still have.

        Raises:
            ValueError: for an optimizer that can step neither parts nor whole parameters, or that was made too early.
        """

        def build_on_parts() -> None:
            build()
            originals.replace_in(self._strategy.optimizers, self._strategy.lightning_module)

        self._build(build_on_parts)
        originals.refuse_ids(self._strategy.lightning_module)
        optimizers, shards = self._strategy.optimizers, self._exchanges.shards
        self.owners = None
        self._divide()
        self._steps = [(optimizer, PartSteps(self.owners)) for optimizer in optimizers]
        self.exchange()
        for optimizer, steps in self._steps:
            _split_states(optimizer, shards)
            held = (p for group in optimizer.param_groups for p in group["params"])
            if self.owners is not None or any(isinstance(p, DTensor) for p in held):
                steps.attach(optimizer)
        self._update_steps()
        self.hide_parameters()
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._hide_parameters = _show_parameters_to(callbacks, optimizers, shards, self._level_groups)

    def hide_parameters(self) -> None:
        """Stop showing the module's parameters to finetuning callbacks."""
        self._hide_parameters()

    def exchange(self) -> None:
        """Replace parameters by shards in the groups, including groups added by callbacks."""
        for optimizer in self._strategy.optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [self._exchanges.optimized(parameter) for parameter in group["params"]]

    def divide_anew(self) -> None:
        """Assign owners again after parameters were unfrozen. A collective."""
        self._divide()
        self._update_steps()

    def restore(self) -> None:
        """Restore the parameter groups of optimizers whose step failed."""
        for optimizer, steps in self._steps:
            steps.restore(optimizer)

    def _divide(self) -> None:
        """Study the optimizers, and assign owners to parameters that must be stepped whole. A collective.

        Raises:
            ValueError: on every rank, if an optimizer does not support the layout.
        """
        exchanges, optimizers = self._exchanges, self._strategy.optimizers
        held = {name: exchanges.optimized(p) for name, p in exchanges.named.items()}
        names = {id(each): name for name, p in exchanges.named.items() for each in (p, held[name])}

        def shape_of(p: Tensor) -> torch.Size:
            return self.whole_shape(names[id(p)], p) if id(p) in names else p.shape

        behaviours = [study(each, shape_of) for each in optimizers]
        self._refuse(behaviours)
        if not self.divides:
            return
        whole = {
            name: held[name]
            for optimizer, behaviour in zip(optimizers, behaviours, strict=True)
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if (name := names.get(id(p))) and not behaviour.is_elementwise(index, shape_of(p))
        }
        if self.owners is None and any_of_ranks(bool(whole), dist.group.WORLD, self._strategy.root_device):
            self.owners = self._make_owners()
        if self.owners is not None:
            self.owners.take({name: each for name, each in whole.items() if name not in self.owners})

    def _refuse(self, behaviours: Iterable[Behaviour]) -> None:
        problems = list(dict.fromkeys(self._problems(behaviours)))
        device = self._strategy.root_device
        if any_of_ranks(bool(problems), dist.group.WORLD, device):
            found = all_gather_values(problems, device=device) if dist.is_initialized() else [problems]
            refuse(dict.fromkeys(problem for each in found for problem in each))

    def _problems(self, behaviours: Iterable[Behaviour]) -> Iterator[str]:
        for behaviour in behaviours:
            if behaviour.problem is not None:
                yield f"{behaviour.problem}, but under {self.typed_layout} {_CLOSURE}"
            elif behaviour.joint is not None and self.divides:
                yield f"{behaviour.joint}, but under {self.typed_layout} no rank has them all. {_REMEDY}"

    def _update_steps(self) -> None:
        exchanges = self._exchanges
        names: dict[Tensor, str] = {exchanges.optimized(p): name for name, p in exchanges.named.items()}
        wholes = {name: p for name, p in exchanges.named.items() if self._is_whole_here(name, p)}
        for _, steps in self._steps:
            steps.know(names, wholes)

    def _is_whole_here(self, name: str, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is whole on every rank and stepped in place."""
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


def _split_states(optimizer: Optimizer, shards: Mapping[nn.Parameter, ParameterShard]) -> None:
    """Replace the state of whole parameters by that of their shards."""
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


# ---- Lightning's finetuning callbacks look for the module's parameters in optimizers, which step shards ----------


def _show_parameters_to(
    callbacks: Iterable[Callback],
    optimizers: Iterable[Optimizer],
    shards: Mapping[nn.Parameter, ParameterShard],
    level: Callable[[], None],
) -> Callable[[], None]:
    """Show the module's parameters to finetuning callbacks in optimizers that step shards.

    Args:
        callbacks: of the Trainer; only finetuning callbacks are wrapped.
        optimizers: whose groups hold shards.
        shards: by parameter.
        level: called after each hook on every rank; pipeline stages may have added different groups.

    Returns:
        A function that undoes it.
    """
    chosen = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
    optimizers = list(optimizers)

    @contextmanager
    def shown() -> Iterator[None]:
        _exchange(optimizers, {shard.optimized: parameter for parameter, shard in shards.items()})
        try:
            with patch.object(BaseFinetuning, "filter_on_optimizer", staticmethod(_not_in)):
                yield
        finally:
            _exchange(optimizers, {parameter: shard.optimized for parameter, shard in shards.items()})
        level()

    for callback in chosen:
        for name in _FINETUNING_HOOKS:
            setattr(callback, name, shown()(getattr(callback, name)))  # a context manager is a decorator, too

    def end() -> None:
        for callback in chosen:
            for name in _FINETUNING_HOOKS:
                vars(callback).pop(name, None)

    return end


def _not_in(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
    """Return those of ``params`` that ``optimizer`` does not step yet.

    Lightning compares values, which for DTensors is a collective of all ranks.
    """
    known = {tensor for group in optimizer.param_groups for tensor in group["params"]}
    return [parameter for parameter in params if parameter not in known]


def _exchange(optimizers: Iterable[Optimizer], others: Mapping[Tensor, Tensor]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [others.get(tensor, tensor) for tensor in group["params"]]
