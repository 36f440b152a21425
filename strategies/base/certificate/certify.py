"""The certificate: the first batch, trained by the layout and by the module as written, gives the same numbers.

Three parties take part, before the first optimizer step, and no weight changes:

1. All ranks run the step of the layout on the batch, forward and backward, and sketch the gradients that the optimizer
   would see (``sketch.py``).
2. Of each group of ranks that share samples, the first runs ``training_step`` of the module as written on the same
   batch: every forward, hook and class is the user's (``written.py``), parameters are whole, one block at a time
   (``stream.py``), blocks are recomputed in backward. The others only send their parts.
3. Losses, logged values and gradients are compared. Gradients of the written module are averaged over the data ranks by
   their sketches.

Both runs draw the same random numbers and none for dropout (``determinism.py``). Afterwards the module is as before
(``state.py``).
"""

from __future__ import annotations

import copy
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.exchange.distinct import from_rank, of_all_ranks
from trainwright.core.layout import Layout
from trainwright.core.run.traits import Traits
from trainwright.core.torch_internals import TorchDispatchMode, _disable_current_modes
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.averaging.averaged import Averaging
from trainwright.strategies.base.certificate.certified import Certified
from trainwright.strategies.base.certificate.changes import Changes, StateBefore, first_other
from trainwright.strategies.base.certificate.compare import Comparison, Found, Tolerance, compare, tolerance_of
from trainwright.strategies.base.certificate.determinism import Deterministic, held_randomness
from trainwright.strategies.base.certificate.outputs import Outputs, first_that_differs
from trainwright.strategies.base.certificate.sketch import WIDTH, sketch_of_part, sketch_of_whole
from trainwright.strategies.base.certificate.state import WrittenWeights, untouched, written_by
from trainwright.strategies.base.certificate.stream import Streamed, Supply
from trainwright.strategies.base.certificate.written import AsWritten, WrittenParameter
from trainwright.strategies.contract.collectives.ranks import Ranks
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.state.assemble import Assembly


class Compared(Protocol):
    """What a strategy shows of itself to be compared with the module as written."""

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

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The layout's own step."""

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The layout's own backward."""

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients as this rank holds them."""


@dataclass
class _Trial:
    """What one run of the first batch gave on this rank.

    Args:
        losses: of ``training_step``, or of each ``manual_backward``.
        logged: name -> value.
        gradients: name -> sketch.
        stepped: names of the parameters of the optimizer whose step ended it; ``None``: none has ended it.
        is_automatic: whether the Trainer runs backward, not the module by hand.
        share: weight of the part of the batch that is run at present.
        error: what ``training_step`` raised.
        state: what it changed in buffers and counters.
        written: names of the parameters that it wrote other values to.
    """

    losses: list[float] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    stepped: frozenset[str] | None = None
    is_automatic: bool = True
    share: float = 1.0
    error: Exception | None = None
    state: Changes = field(default_factory=dict)
    written: Set[str] = frozenset()


# Parts of a batch, and their weights.
_Parts = Sequence[tuple[Any, float]]


class _Stepped(BaseException):
    """Raised where user code steps an optimizer: what it would step with is all that is compared."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer


def certify(strategy: Compared, written: AsWritten, batch: Any, batch_idx: int) -> Comparison:
    """Compare the layout's numbers for one batch with those of the module as written. A collective of all ranks.

    Args:
        strategy: set up, between two steps, with gradients that nobody needs any more.
        written: of its module.
        batch: of this rank, on its device; it is copied.
        batch_idx: index of the batch in the epoch.

    Returns:
        The same comparison on every rank.

    Raises:
        RuntimeError: if the module as written cannot run on the batch that the layout has run on.
    """
    began = time.perf_counter()
    module = strategy.lightning_module
    tolerance = tolerance_of(strategy.precision_plugin, module)
    parts = strategy.certified.shares(batch)
    with _quiet(strategy), _disable_current_modes():  # of callbacks that count operators
        layout = _run_layout(strategy, written, _arguments(module, batch, batch_idx))
        plain = _run_written(strategy, written, parts, batch_idx)
        changed = _other_state(strategy, layout, plain, tolerance) if len(parts) == 1 else None
        changed = _raise_together(plain, changed, strategy.root_device)
        found = _agree(strategy, written.parameters, layout, plain)
        names = [each.name for each in written.parameters]
        outcome = compare(names, found, tolerance, seconds=time.perf_counter() - began)
        outcome = replace(outcome, state=changed)
        if outcome.holds:
            return outcome
        return replace(outcome, module=_first_module(strategy, written, batch, parts, batch_idx, outcome))


def _first_module(
    strategy: Compared, written: AsWritten, batch: Any, parts: _Parts, batch_idx: int, outcome: Comparison
) -> str:
    """Name of the first module whose output differs; of the parameter nearest to the loss, where only gradients do.

    Both runs are made once more, with an ear on every module.
    """
    module = strategy.lightning_module
    names = [name for name, _ in module.named_modules()]
    assembly, _ = strategy.certified.parts()
    heard = [name for name in names if _is_computed_here(assembly, name)]
    places = {id(module.get_submodule(name)): names.index(name) for name in names if name}
    here = {id(module.get_submodule(name)): names.index(name) for name in heard if name}
    layout, plain = Outputs(here, len(names)), Outputs(places, len(names))
    with layout.listening():
        _run_layout(strategy, written, _arguments(module, batch, batch_idx))
    with plain.listening():
        _run_written(strategy, written, parts, batch_idx)
    place = first_that_differs(layout, plain, outcome.tolerance.gradient, strategy.root_device)
    if place is not None:
        return str(names[place])
    return outcome.wrong[-1][0] if outcome.wrong else outcome.state or ""


def _is_computed_here(assembly: Assembly | None, name: str) -> bool:
    """Whether what a module returns on this rank is a part of its output; stages run what they do not hold on zeros."""
    if assembly is None or assembly.pipeline is None:
        return True
    held = [owner for key, owner in assembly.owners.items() if key.startswith(f"{name}.")]
    return bool(held) and set(held) == {dist.get_rank(assembly.pipeline)}


# ---- the layout ------------------------------------------------------------------------------------------------------


def _run_layout(strategy: Compared, written: AsWritten, arguments: tuple[Any, ...]) -> _Trial:
    module = strategy.lightning_module
    trial = _Trial(is_automatic=module.automatic_optimization)
    held = {each.name: strategy.certified.held(each.name) for each in written.parameters}
    weights = WrittenWeights({name: local_tensor(tensor) for name, tensor in held.items() if tensor is not None})
    assembly, _ = strategy.certified.parts()
    shapes = {each.name: each.shape for each in written.parameters}
    try:
        with untouched(module), held_randomness(strategy.root_device), _captured(module, trial):
            before = StateBefore(module)
            with Deterministic(), _Watched(lambda _, written: weights.before(written)), _ending(strategy, trial):
                output = strategy.training_step(*arguments)
                loss = _loss_of(output)
                if loss is not None and module.automatic_optimization:
                    trial.losses.append(float(loss.detach().float().item()))
                    if not strategy.traits.backward_in_step:
                        strategy.backward(loss, strategy.optimizers[0] if strategy.optimizers else None)
            for name, gradient in strategy.named_gradients():
                cut = None if assembly is None else assembly.cuts.get(name)
                trial.gradients[name] = sketch_of_part(name, shapes[name], gradient, cut)
            trial.state, trial.written = before.changes(), weights.changed()
    except Exception as error:
        if not _is_ours(error):
            error.add_note(
                f"This was the first batch under {strategy.layout}, and no weight has changed. If the same step runs "
                f"with strategy=single, this layout cannot run it. {strategy.certified.remedy('')}"
            )
        raise
    finally:
        for optimizer in strategy.optimizers:
            optimizer.zero_grad(set_to_none=True)
        module.zero_grad(set_to_none=True)
        weights.restore()
    return trial


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised ``error``: then it says what to type."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("trainwright.")


# ---- the module as written -------------------------------------------------------------------------------------------


def _run_written(strategy: Compared, written: AsWritten, parts: _Parts, batch_idx: int) -> _Trial | None:
    """What the module as written gives, or raises; ``None`` on a rank that only sends its parts."""
    module = strategy.lightning_module
    assembly, group = strategy.certified.parts()
    dtypes = {each.name: getattr(*each.slots[0]).dtype for each in written.parameters}
    trained = _trained(strategy, written)
    units = _units(written, strategy.block_names)
    supply = Supply(written.parameters, units, strategy.certified.held, dtypes, assembly, group, strategy.root_device)
    if not supply.leads:
        supply.serve()
        return None
    trial = _Trial()

    def take(name: str, gradient: Tensor) -> None:
        sketch = sketch_of_whole(name, gradient)
        trial.gradients[name] = trial.gradients[name] + sketch if name in trial.gradients else sketch

    streamed = Streamed(supply, written.parameters, trained, dtypes, strategy.root_device, take)
    blocks = [module.get_submodule(name) for name in strategy.block_names]
    randomness = Deterministic()
    try:
        with ExitStack() as stack:
            stack.enter_context(_threads_of(1 if group is None else group.size()))
            stack.enter_context(untouched(module))
            stack.enter_context(held_randomness(strategy.root_device))
            stack.enter_context(strategy.ranks.among_data_ranks())  # one rank of each group is here
            stack.enter_context(written.shown(streamed.parameters))
            stack.enter_context(_captured(module, trial, backward=module.backward))
            streamed.pin(0)
            stack.enter_context(streamed.around(blocks, randomness))
            stack.enter_context(randomness)
            stack.enter_context(_Watched(streamed.before))
            stack.enter_context(_ending(strategy, trial))
            losses, before = [], StateBefore(module)
            for part, trial.share in parts:
                with strategy.precision_plugin.train_step_context():
                    output = module.training_step(*_arguments(module, part, batch_idx))
                loss = _loss_of(output)
                if loss is not None and module.automatic_optimization:
                    losses.append(float(loss.detach().float().item()) * trial.share)
                    if loss.requires_grad:
                        module.backward(loss * trial.share)
            trial.losses += [sum(losses)] if losses else []
            trial.state, trial.written = before.changes(), streamed.changed()
    except Exception as error:
        trial.error = error
    finally:
        supply.end()
        streamed.close()
    return trial


@contextmanager
def _threads_of(ranks: int) -> Iterator[None]:
    """Compute with the threads of as many ranks, of which all but this one wait.

    No more than this machine has for the groups of ranks on it: threads that share a core spin.
    """
    own, local = torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fair = (os.cpu_count() or 1) // max(1, local // ranks)
    torch.set_num_threads(max(own, min(own * ranks, fair)))
    try:
        yield
    finally:
        torch.set_num_threads(own)


def _other_state(strategy: Compared, layout: _Trial, plain: _Trial | None, tolerance: Tolerance) -> str | None:
    """A buffer, counter or parameter that the layout changes otherwise on this rank. A collective."""
    assembly, group = strategy.certified.parts()
    told = None if plain is None or plain.error is not None else (plain.state, plain.written)
    if group is not None:
        told = from_rank(told, 0, group, strategy.root_device)
    if told is None:
        return None
    state, written = told
    wrong = next((n for n in sorted(layout.written ^ written) if strategy.certified.held(n) is not None), None)
    if wrong is not None:
        return str(wrong)

    def is_known(path: str) -> bool:
        """What is outside of the blocks is the same on all ranks after a step."""
        block = next((name for name in strategy.block_names if f"{path}.".startswith(f"{name}.")), None)
        return block is None or _is_computed_here(assembly, block)

    return first_other(layout.state, state, is_known, tolerance.logged)


def _raise_together(plain: _Trial | None, changed: str | None, device: torch.device) -> str | None:
    """Raise on every rank if the module as written raised on one; else what any rank has ``changed``. A collective."""
    error = None if plain is None else plain.error
    own = (None if error is None else f"{type(error).__name__}: {error}", changed)
    told = of_all_ranks(own, device=device)
    raised, changed = (next(filter(None, each), None) for each in zip(*told, strict=True))
    if raised is not None:
        raise RuntimeError(
            "The certificate of this layout could not be made: training_step of the module as written raised on a "
            f"batch on which the layout did not: {raised}. If the step cannot run twice on the same batch, type "
            "strategy.certificate=off (in Python certificate='off')."
        ) from error
    return changed


def _trained(strategy: Compared, written: AsWritten) -> dict[str, bool]:
    """Which parameters are trained, by the ranks that hold them: ``configure_optimizers`` may have frozen some."""
    here = {each.name: strategy.certified.held(each.name) for each in written.parameters}
    own = {name: held.requires_grad for name, held in here.items() if held is not None}
    told = of_all_ranks(own, device=strategy.root_device) if dist.is_initialized() else [own]
    return {
        each.name: next((h[each.name] for h in told if each.name in h), each.requires_grad)
        for each in written.parameters
    }


def _units(written: AsWritten, blocks: Sequence[str]) -> list[list[str]]:
    """Names of parameters outside of the blocks or of several, then those of each block."""
    inside: dict[str, int] = {}
    for each in written.parameters:
        places = {_block_of(owner, key, written, blocks) for owner, key in each.slots}
        inside[each.name] = places.pop() if len(places) == 1 else 0
    return [[name for name, unit in inside.items() if unit == number] for number in range(len(blocks) + 1)]


def _block_of(owner: nn.Module, key: str, written: AsWritten, blocks: Sequence[str]) -> int:
    name = written.name_of(owner)
    return next((i for i, block in enumerate(blocks, 1) if name == block or name.startswith(f"{block}.")), 0)


# ---- around both -----------------------------------------------------------------------------------------------------


class _Watched(TorchDispatchMode):
    """Shows all tensors among its arguments, and those that it writes to, to ``look`` before each operator runs."""

    def __init__(self, look: Callable[[Iterable[Tensor], Iterable[Tensor]], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look, then run ``func``."""
        kwargs = kwargs or {}
        tensors = (leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if type(leaf) in _PLAIN)
        self._look(tensors, written_by(func, args, kwargs))
        return func(*args, **kwargs)


_PLAIN = (Tensor, nn.Parameter)


def _arguments(module: LightningModule, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """What ``training_step`` is given; a copy, since it may change its batch."""
    batch = _copied(batch)
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return (batch, batch_idx) if takes_index else (batch,)


def _copied(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except RuntimeError:  # a tensor with a graph: a hook has computed it
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), batch)


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


@contextmanager
def _captured(
    module: LightningModule, trial: _Trial, backward: Callable[[Tensor], None] | None = None
) -> Iterator[None]:
    """Keep what the module logs, and the losses of manual optimization.

    Args:
        module: whose ``log`` and ``manual_backward`` are exchanged.
        trial: where to.
        backward: runs backward of a loss in place of the strategy; ``None``: the strategy does.
    """
    run_backward = module.manual_backward if backward is None else backward

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            before = trial.logged.get(name, 0.0) if trial.share != 1 else 0.0
            number = value.detach() if isinstance(value, Tensor) else value
            trial.logged[name] = before + trial.share * float(number)

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        trial.losses.append(float(loss.detach().float().item()))
        run_backward(loss, *args, **kwargs)

    def leave(*_: Any, **__: Any) -> Tensor:
        """Gradients are compared before they are clipped."""
        return torch.zeros(())

    clips = {"clip_grad_norm_": leave, "clip_grad_value_": leave}
    with (
        _attributes(module, log=log, manual_backward=manual_backward, clip_gradients=leave),
        _attributes(torch.nn.utils, **clips),
        _attributes(torch.nn.utils.clip_grad, **clips),
    ):
        yield


@contextmanager
def _attributes(target: Any, **values: Any) -> Iterator[None]:
    """Exchange attributes of an object for as long as this is entered."""
    held = vars(target)
    before = {name: held[name] for name in values if name in held}
    held.update(values)
    try:
        yield
    finally:
        for name in values:
            held.pop(name, None)
        held.update(before)


@contextmanager
def _ending(strategy: Compared, trial: _Trial) -> Iterator[None]:
    """End quietly where user code steps an optimizer, before it changes anything."""

    def stopping(optimizer: Optimizer) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            if closure is not None:
                with torch.enable_grad():
                    closure()
            raise _Stepped(optimizer)

        return step

    with ExitStack() as stack:
        for optimizer in strategy.optimizers:
            stack.enter_context(_attributes(optimizer, step=stopping(optimizer)))
            stack.enter_context(_kept_groups(optimizer))
        for config in strategy.lr_scheduler_configs:
            stack.enter_context(_attributes(config.scheduler, **vars(config.scheduler)))
        try:
            yield
        except _Stepped as reached:
            name_of = strategy._name_of()  # type: ignore[attr-defined]
            groups = reached.optimizer.param_groups
            trial.stepped = frozenset(name_of(parameter) for group in groups for parameter in group["params"])


@contextmanager
def _kept_groups(optimizer: Optimizer) -> Iterator[None]:
    """Keep learning rates and the like, and which parameters are trained: user code may toggle an optimizer off."""
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    trained = [(parameter, parameter.requires_grad) for group in groups for parameter in group["params"]]
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)


class _NoHooks:
    """Stands for a table of hooks of which none is overridden."""

    heard: frozenset[str] = frozenset()


@contextmanager
def _quiet(strategy: Compared) -> Iterator[None]:
    """No hook, logger, loss scale or weight of samples acts while this is entered."""
    trainer: Any = strategy.lightning_module.trainer
    plugin = strategy.precision_plugin
    loggers = trainer.loggers
    with ExitStack() as stack:
        stack.enter_context(_attributes(plugin, hooks=_NoHooks(), scaler=None))
        stack.enter_context(_attributes(strategy, loss_factor=1.0, loss_divisor=1.0))
        if strategy.averaging.compression is not None:
            # Replicas are averaged with a loss: then each replica's own gradients are compared, in the mean.
            stack.enter_context(strategy.averaging.accumulating())
        stack.enter_context(_attributes(trainer, token_weights=None))
        trainer.loggers = [DummyLogger()] if loggers else []
        try:
            yield
        finally:
            trainer.loggers = loggers


# ---- what ranks tell each other --------------------------------------------------------------------------------------

# Losses of manual optimization that are compared, from the first on.
_LOSSES = 4


def _agree(strategy: Compared, parameters: Sequence[WrittenParameter], layout: _Trial, plain: _Trial | None) -> Found:
    """Bring together what ranks found, on every rank; one all-reduce."""
    ranks, logged = strategy.ranks.num_data_ranks, sorted(layout.logged)
    losses = torch.zeros(ranks, _LOSSES, 2, dtype=torch.float64)
    values = torch.zeros(ranks, len(logged), 2, dtype=torch.float64)
    table = torch.zeros(len(parameters), 2 * WIDTH + 1, dtype=torch.float64)
    if plain is not None:
        for place, pair in enumerate(zip(layout.losses[:_LOSSES], plain.losses[:_LOSSES], strict=False)):
            losses[strategy.ranks.data_rank, place] = torch.tensor(pair, dtype=torch.float64)
        for place, name in enumerate(logged):
            pair = layout.logged[name], plain.logged.get(name, math.nan)
            values[strategy.ranks.data_rank, place] = torch.tensor(pair, dtype=torch.float64)
    for row, each in enumerate(parameters):
        if each.name in layout.gradients:
            table[row, :WIDTH] = layout.gradients[each.name]
        if plain is not None and each.name in plain.gradients:
            table[row, WIDTH : 2 * WIDTH] = plain.gradients[each.name] / ranks
        # By hand, gradients are complete where an optimizer steps with them, and not before.
        table[row, -1] = each.name in layout.stepped if layout.stepped is not None else layout.is_automatic
    sizes = [losses.numel(), values.numel(), table.numel()]
    sent = torch.cat([losses.flatten(), values.flatten(), table.flatten()]).to(strategy.root_device)
    dist.all_reduce(sent)
    losses, values, table = (
        part.view(shape)
        for part, shape in zip(sent.cpu().split(sizes), (losses.shape, values.shape, table.shape), strict=True)
    )
    return Found(
        losses=losses.view(-1, 2),
        logged=[(name, *values[rank, i].tolist()) for rank in range(ranks) for i, name in enumerate(logged)],
        layout=table[:, :WIDTH],
        plain=table[:, WIDTH : 2 * WIDTH],
        sizes=[math.prod(each.shape) for each in parameters],
        compared=(table[:, -1] > 0).tolist(),
    )
