"""Lightning's finetuning callbacks with optimizers that step shards: the callbacks look for the module's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
        for name in _HOOKS:
            setattr(callback, name, shown()(getattr(callback, name)))  # a context manager is a decorator, too

    def end() -> None:
        for callback in chosen:
            for name in _HOOKS:
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
