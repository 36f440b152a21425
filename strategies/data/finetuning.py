"""Lightning's finetuning callbacks where optimizers step shards: they look for the module's own parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.strategies.state.shards import ParameterShard

_HOOKS = ("on_fit_start", "on_train_epoch_start")


def show_parameters_to(
    callbacks: Iterable[Callback],
    optimizers: Iterable[Optimizer],
    shards: Mapping[nn.Parameter, ParameterShard],
    level: Callable[[], None],
) -> Callable[[], None]:
    """Let finetuning callbacks see the module's parameters in the groups of optimizers that step shards of them.

    Args:
        callbacks: of the Trainer; others than finetuning callbacks stay as they are.
        optimizers: whose groups hold shards.
        shards: of parameters, by the parameter.
        level: called after them, on every rank; stages of a pipeline may have added different groups.

    Returns:
        How to end that.
    """
    chosen = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
    optimizers = list(optimizers)
    for callback in chosen:
        for name in _HOOKS:
            setattr(callback, name, _shown(getattr(callback, name), optimizers, shards, level))

    def end() -> None:
        for callback in chosen:
            for name in _HOOKS:
                vars(callback).pop(name, None)

    return end


def _shown(
    hook: Callable[..., None],
    optimizers: list[Optimizer],
    shards: Mapping[nn.Parameter, ParameterShard],
    level: Callable[[], None],
) -> Callable[..., None]:
    @wraps(hook)
    def call(*args: Any) -> None:
        with _showing(optimizers, shards):
            hook(*args)
        level()

    return call


@contextmanager
def _showing(optimizers: list[Optimizer], shards: Mapping[nn.Parameter, ParameterShard]) -> Iterator[None]:
    wholes: dict[Tensor, Tensor] = {shard.optimized: parameter for parameter, shard in shards.items()}
    steps: dict[Tensor, Tensor] = {parameter: shard.optimized for parameter, shard in shards.items()}
    _exchange(optimizers, wholes)
    try:
        with patch.object(BaseFinetuning, "filter_on_optimizer", staticmethod(_not_in)):
            yield
    finally:
        _exchange(optimizers, steps)


def _not_in(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
    """Return those of ``params`` that ``optimizer`` does not step yet.

    Lightning compares values, which for DTensors takes all ranks, of which others may not have them.
    """
    known = {tensor for group in optimizer.param_groups for tensor in group["params"]}
    return [parameter for parameter in params if parameter not in known]


def _exchange(optimizers: list[Optimizer], others: Mapping[Tensor, Tensor]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [others.get(tensor, tensor) for tensor in group["params"]]
