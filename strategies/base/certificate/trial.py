"""A trial run of the first batch: its contexts and results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from trainwright.core.layout import Layout
from trainwright.core.run.traits import Traits
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.averaging.replica_averaging import Averaging
from trainwright.strategies.base.certificate.certified import Certified
from trainwright.strategies.base.certificate.determinism import EagerMode
from trainwright.strategies.base.certificate.state import written_by
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.contract.collectives.ranks import Ranks
from trainwright.strategies.contract.options import StrategyOptions


class Compared(Protocol):
    """A strategy as seen by the certificate."""

    lightning_module: LightningModule
    precision_plugin: Any
    optimizers: list[Optimizer]
    lr_scheduler_configs: list[Any]
    root_device: torch.device
    loss_factor: float
    loss_divisor: float | None
    block_names: tuple[str, ...]
    traits: Traits
    ranks: Ranks
    certified: Certified
    layout: Layout
    averaging: Averaging
    options: StrategyOptions

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layout's step."""

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layout's backward."""

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's gradients."""


@dataclass
class Trial:
    """Results of one run of the first batch on this rank.

    Args:
        losses: of ``training_step``, or of each ``manual_backward``.
        logged: name -> value.
        gradients: name -> sketch.
        stepped: names of the parameters of the optimizer whose step ended the run; ``None``: none did.
        is_automatic: whether optimization is automatic.
        error: raised by ``training_step``.
        state: changes of buffers and counters.
        written: names of modified parameters.
    """

    losses: list[float] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    stepped: frozenset[str] | None = None
    is_automatic: bool = True
    error: Exception | None = None
    state: Changes = field(default_factory=dict)
    written: Set[str] = frozenset()

    def see(self, loss: Tensor) -> None:
        """Record a loss."""
        self.losses.append(float(loss.detach().float().item()))


class _Stepped(BaseException):
    """Raised where user code steps an optimizer, to end the trial."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer


class WatchedTensors(EagerMode):
    """Dispatch mode that passes an operator's tensor arguments, and those it writes to, to ``look`` before it runs."""

    def __init__(self, look: Callable[[Iterable[Tensor], Iterable[Tensor]], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``look``, then run ``func``."""
        kwargs = kwargs or {}
        tensors = (leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if type(leaf) in _PLAIN)
        self._look(tensors, written_by(func, args, kwargs))
        return func(*args, **kwargs)


_PLAIN = (Tensor, nn.Parameter)


def arguments(module: LightningModule, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """Return the arguments of ``training_step``, with a copy of the batch, which it may modify."""
    batch = copied(batch)
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return (batch, batch_idx) if takes_index else (batch,)


def copied(batch: Any) -> Any:
    """Return a deep copy of a batch."""
    try:
        return copy.deepcopy(batch)
    except RuntimeError:  # a non-leaf tensor, computed by a hook
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), batch)


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in the output of ``training_step``; ``None`` if there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


@contextmanager
def captured(module: LightningModule, trial: Trial, backward: Callable[[Tensor], None] | None = None) -> Iterator[None]:
    """Record logged values and the losses of manual optimization.

    Args:
        module: whose ``log`` and ``manual_backward`` are patched.
        trial: to record to.
        backward: replaces the strategy's backward; ``None``: keep it.
    """
    run_backward = module.manual_backward if backward is None else backward

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            number = value.detach() if isinstance(value, Tensor) else value
            trial.logged[name] = float(number)

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        trial.see(loss)
        run_backward(loss, *args, **kwargs)

    def skip(*_: Any, **__: Any) -> Tensor:  # gradients are compared before clipping
        return torch.zeros(())

    clips = {"clip_grad_norm_": skip, "clip_grad_value_": skip}
    with (
        with_attributes(module, log=log, manual_backward=manual_backward, clip_gradients=skip),
        with_attributes(torch.nn.utils, **clips),
        with_attributes(torch.nn.utils.clip_grad, **clips),
    ):
        yield


@contextmanager
def stopped_at_step(strategy: Compared, trial: Trial) -> Iterator[None]:
    """End the ``with`` block where user code steps an optimizer, before the step."""

    def stopping(optimizer: Optimizer) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            if closure is not None:
                with torch.enable_grad():
                    closure()
            raise _Stepped(optimizer)

        return step

    with ExitStack() as stack:
        for optimizer in strategy.optimizers:
            stack.enter_context(with_attributes(optimizer, step=stopping(optimizer)))
            for group in optimizer.param_groups:  # which user code may change (``toggle_optimizer``)
                stack.callback(group.update, {**group, "params": list(group["params"])})
                for parameter in group["params"]:
                    stack.callback(parameter.requires_grad_, parameter.requires_grad)
        for config in strategy.lr_scheduler_configs:
            stack.enter_context(with_attributes(config.scheduler, **vars(config.scheduler)))
        try:
            yield
        except _Stepped as reached:
            name_of = strategy._name_of()  # type: ignore[attr-defined]
            groups = reached.optimizer.param_groups
            trial.stepped = frozenset(name_of(parameter) for group in groups for parameter in group["params"])


@contextmanager
def gradients_aside(strategy: Compared) -> Iterator[None]:
    """Run without the gradients of earlier steps, which user code may read or accumulate, and restore them."""
    groups = (group["params"] for optimizer in strategy.optimizers for group in optimizer.param_groups)
    aside = {tensor: tensor.grad for tensor in chain(strategy.lightning_module.parameters(), *groups)}
    for tensor in aside:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in aside.items():
            tensor.grad = gradient


@contextmanager
def quiet(strategy: Compared) -> Iterator[None]:
    """Disable hooks, loggers, loss scaling and sample weights in a ``with`` block."""
    trainer: Any = strategy.lightning_module.trainer
    plugin = strategy.precision_plugin
    loggers = [DummyLogger()] if trainer.loggers else []
    with ExitStack() as stack:
        stack.enter_context(with_attributes(plugin, hooks=SimpleNamespace(heard=frozenset()), scaler=None))
        stack.enter_context(with_attributes(strategy, loss_factor=1.0, loss_divisor=1.0))
        if strategy.averaging.compression is not None:
            # Compressed averages are lossy: compare the mean of each replica's own gradients instead.
            stack.enter_context(strategy.averaging.accumulating())
        stack.enter_context(with_attributes(trainer, token_weights=None, _loggers=loggers))
        yield


Changes = Mapping[str, Tensor]


class StateBefore:
    """Snapshot of a module's buffers and integer attributes. Floats are excluded, since they may be times."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = {name: value.clone() for name, value in _state_of(module)}

    def changes(self) -> Changes:
        """Return the difference of each value that has changed since and kept its shape, by name."""
        pairs = ((name, value, self._values.get(name)) for name, value in _state_of(self._module))
        return {
            name: _number(value) - _number(before)
            for name, value, before in pairs
            if before is not None and before.shape == value.shape and not torch.equal(before, value)
        }


def _state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, sub in module.named_modules():
        if isinstance(sub, Metric):
            continue  # accumulates over micro-batches, and is synchronized when computed
        prefix = f"{path}." if path else ""
        for name, buffer in sub._buffers.items():
            # Pipeline stages have placeholders for values of other stages.
            if type(buffer) is Tensor and not buffer.is_meta and buffer.layout is torch.strided:
                yield prefix + name, buffer.detach()
        for name, value in vars(sub).items():
            if type(value) is int and abs(value) < 2**53:
                yield prefix + name, torch.tensor(value)


def _number(value: Tensor) -> Tensor:
    return value.cpu().to(torch.complex128 if value.is_complex() else torch.float64)


def first_difference(
    layout: Changes, plain: Changes, is_on_rank: Callable[[str], bool], tolerance: float
) -> str | None:
    """Return the name of the first value that the layout changes differently than the module as written.

    Args:
        layout, plain: their changes on this rank.
        is_on_rank: whether the layout runs the submodule of a path on this rank.
        tolerance: relative difference explained by rounding.
    """
    for name in [*plain, *(name for name in layout if name not in plain)]:
        one, other = layout.get(name), plain.get(name)
        shown = one if other is None else other
        assert shown is not None
        one, other = (torch.zeros_like(shown) if each is None else each for each in (one, other))
        if one.shape != other.shape or not is_on_rank(name.rpartition(".")[0]):
            continue  # this rank has only a part
        if not (one - other).abs().max() <= tolerance * max(float(other.abs().max()), 1e-6):
            return name
    return None
