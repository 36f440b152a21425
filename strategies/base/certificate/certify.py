"""Comparison of the layout with the module as written, on one batch.

Before an optimizer step, and without changing weights:

1. All ranks run the layout's forward and backward on the batch, and sketch the gradients of the optimizer
   (``sketch.py``).
2. In each group of ranks that share samples, the first runs ``training_step`` of the module as written on the same
   batch, with the user's forwards, hooks and classes (``written.py``). Parameters are gathered one block at a time
   (``stream.py``), and blocks are recomputed in backward. The other ranks only send their parts.
3. Losses, logged values and gradient sketches, averaged over data ranks, are compared.

Both runs draw the same random numbers, without dropout (``determinism.py``). The module is restored afterwards
(``state.py``).
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from trainwright.checkpoint.exchange.distinct import all_gather_values, broadcast_value
from trainwright.core.processes.machine import use_threads
from trainwright.core.torch_internals import _disable_current_modes
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.base.certificate.compare import Comparison, Found, Tolerance, compare, tolerance_of
from trainwright.strategies.base.certificate.determinism import Deterministic, fixed_seed
from trainwright.strategies.base.certificate.sketch import WIDTH, sketch_of_part, sketch_of_whole
from trainwright.strategies.base.certificate.state import WrittenWeights, untouched
from trainwright.strategies.base.certificate.stream import Streamed, Supply
from trainwright.strategies.base.certificate.trial import (
    Compared,
    StateBefore,
    Trial,
    WatchedTensors,
    arguments,
    captured,
    first_difference,
    gradients_aside,
    loss_of,
    quiet,
    stopped_at_step,
)
from trainwright.strategies.base.certificate.written import AsWritten, WrittenParameter
from trainwright.strategies.contract.gradients import local_tensor
from trainwright.strategies.state.assemble import Assembly


def certify(strategy: Compared, written: AsWritten, batch: Any, batch_idx: int) -> Comparison:
    """Compare the layout's results for one batch with those of the module as written. A collective of all ranks.

    Args:
        strategy: set up, between two optimizer steps.
        written: of its module.
        batch: of this rank, on its device; copied.
        batch_idx: index of the batch in the epoch.

    Returns:
        The same comparison on every rank.

    Raises:
        RuntimeError: if the module as written fails on a batch on which the layout succeeds.
    """
    start = time.perf_counter()
    module = strategy.lightning_module
    tolerance = tolerance_of(strategy.precision_plugin, module, strategy.options.rounds_to)
    with quiet(strategy), _disable_current_modes():  # callbacks may count operators
        layout = _run_layout(strategy, written, arguments(module, batch, batch_idx))
        has_run = time.perf_counter()
        plain = _run_written(strategy, written, batch, batch_idx)
        changed = _different_state(strategy, layout, plain, tolerance)
        changed = _raise_on_all(plain, changed, strategy.root_device)
        found = _gather_results(strategy, written.parameters, layout, plain)
        names = [each.name for each in written.parameters]
        now = time.perf_counter()
        outcome = replace(compare(names, found, tolerance, now - start, changed), written_seconds=now - has_run)
        if outcome.holds:
            return outcome
        if not strategy.certified.adapts():
            return replace(outcome, module=_first_module(strategy, written, batch, batch_idx, outcome))
    return certify(strategy, written, batch, batch_idx)


def _first_module(strategy: Compared, written: AsWritten, batch: Any, batch_idx: int, outcome: Comparison) -> str:
    """Repeat both runs with hooks and return the name of the first module whose output differs.

    If only gradients differ, return the parameter nearest to the loss.
    """
    module = strategy.lightning_module
    names = [name for name, _ in module.named_modules()]
    assembly, _ = strategy.certified.parts()
    places = {id(module.get_submodule(name)): place for place, name in enumerate(names) if name}
    on_rank = {key: place for key, place in places.items() if _is_on_rank(assembly, names[place])}
    layout, plain = Outputs(on_rank, len(names)), Outputs(places, len(names))
    with layout.listening():
        _run_layout(strategy, written, arguments(module, batch, batch_idx))
    with plain.listening():
        _run_written(strategy, written, batch, batch_idx)
    place = first_that_differs(layout, plain, outcome.tolerance.gradient, strategy.root_device)
    if place is not None:
        return str(names[place])
    return outcome.wrong[-1][0] if outcome.wrong else outcome.state or ""


def _is_on_rank(assembly: Assembly, name: str) -> bool:
    """Return whether this rank computes a module's output; pipeline stages run other stages' modules on zeros."""
    if assembly.pipeline is None:
        return True
    held = [owner for key, owner in assembly.owners.items() if key.startswith(f"{name}.")]
    return bool(held) and set(held) == {dist.get_rank(assembly.pipeline)}


# ---- the layout ------------------------------------------------------------------------------------------------------


def _run_layout(strategy: Compared, written: AsWritten, arguments: tuple[Any, ...]) -> Trial:
    module = strategy.lightning_module
    trial = Trial(is_automatic=module.automatic_optimization)
    held = {each.name: strategy.certified.held(each.name) for each in written.parameters}
    weights = WrittenWeights({name: local_tensor(tensor) for name, tensor in held.items() if tensor is not None})
    assembly, _ = strategy.certified.parts()
    shapes = {each.name: each.shape for each in written.parameters}
    try:
        with gradients_aside(strategy), untouched(module), fixed_seed(strategy.root_device), captured(module, trial):
            before = StateBefore(module)
            with (
                Deterministic(),
                WatchedTensors(lambda _, written: weights.before(written)),
                stopped_at_step(strategy, trial),
            ):
                output = strategy.training_step(*arguments)
                loss = loss_of(output)
                if loss is not None and module.automatic_optimization:
                    trial.see(loss)
                    if not strategy.traits.backward_in_step:
                        strategy.backward(loss, strategy.optimizers[0] if strategy.optimizers else None)
            for name, gradient in strategy.named_gradients():
                trial.gradients[name] = sketch_of_part(name, shapes[name], gradient, assembly.cuts.get(name))
            trial.state, trial.written = before.changes(), weights.changed()
    except Exception as error:
        if not _is_ours(error):
            error.add_note(
                f"This was a comparison before a step under {strategy.layout}, and no weight has changed in it. If the "
                f"same step runs with strategy=single, this layout cannot run it. {strategy.certified.remedy('')}"
            )
        raise
    finally:
        weights.restore()
    return trial


def _is_ours(error: BaseException) -> bool:
    """Return whether this package raised ``error``, whose message then has a remedy."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("trainwright.")


# ---- the module as written -------------------------------------------------------------------------------------------


def _run_written(strategy: Compared, written: AsWritten, batch: Any, batch_idx: int) -> Trial | None:
    """Run the module as written; returns ``None`` on a rank that only sends its parts."""
    module = strategy.lightning_module
    assembly, group = strategy.certified.parts()
    dtypes = {each.name: getattr(*each.slots[0]).dtype for each in written.parameters}
    trained = _trained(strategy, written)
    units = _units(written, strategy.block_names)
    supply = Supply(written.parameters, units, strategy.certified.held, dtypes, assembly, group, strategy.root_device)
    if not supply.leads:
        supply.serve()
        return None
    trial = Trial()

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
            stack.enter_context(fixed_seed(strategy.root_device))
            stack.enter_context(strategy.ranks.among_data_ranks())  # runs on one rank per group
            stack.enter_context(written.shown(streamed.parameters, strategy.root_device))
            stack.enter_context(captured(module, trial, backward=module.backward))
            streamed.pin(0)
            stack.enter_context(streamed.around(blocks, randomness))
            stack.enter_context(randomness)
            stack.enter_context(WatchedTensors(streamed.before))
            before = StateBefore(module)
            with stopped_at_step(strategy, trial):
                with strategy.precision_plugin.train_step_context(), streamed.keeping_gradients():
                    output = module.training_step(*arguments(module, batch, batch_idx))
                loss = loss_of(output)
                if loss is not None and module.automatic_optimization:
                    trial.see(loss)
                    if loss.requires_grad:
                        # Scaled as by accumulation, which must scale gradients alike.
                        module.backward(loss / module.trainer.accumulate_grad_batches)
            streamed.take_kept()
            trial.state, trial.written = before.changes(), streamed.changed()
    except Exception as error:
        trial.error = error
    finally:
        supply.end()
        streamed.close()
    return trial


@contextmanager
def _threads_of(ranks: int) -> Iterator[None]:
    """Use the threads of ``ranks`` ranks, of which all but this one are idle, without oversubscribing the machine."""
    own, local = torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fair = (os.cpu_count() or 1) // max(1, local // ranks)
    use_threads(max(own, min(own * ranks, fair)))
    try:
        yield
    finally:
        use_threads(own)


def _different_state(strategy: Compared, layout: Trial, plain: Trial | None, tolerance: Tolerance) -> str | None:
    """Return a buffer, counter or parameter that the layout changes differently on this rank. A collective."""
    assembly, group = strategy.certified.parts()
    # The rows of one rank may stay as they are.
    changed = set[str]().union(*all_gather_values(sorted(layout.written), device=strategy.root_device))
    changes = None if plain is None or plain.error is not None else (plain.state, plain.written)
    if group is not None:
        changes = broadcast_value(changes, 0, group, strategy.root_device)
    if changes is None:
        return None
    state, written = changes
    differing = sorted((layout.written - written) | (written - changed))
    wrong = next((name for name in differing if strategy.certified.held(name) is not None), None)
    if wrong is not None:
        return str(wrong)

    def is_known(path: str) -> bool:
        # Modules outside of the blocks are equal on all ranks after a step.
        block = next((name for name in strategy.block_names if f"{path}.".startswith(f"{name}.")), None)
        return block is None or _is_on_rank(assembly, block)

    return first_difference(layout.state, state, is_known, tolerance.logged)


def _raise_on_all(plain: Trial | None, changed: str | None, device: torch.device) -> str | None:
    """Raise on every rank if the module as written raised on one; else return any rank's ``changed``. A collective."""
    error = None if plain is None else plain.error
    own = (None if error is None else f"{type(error).__name__}: {error}", changed)
    found = all_gather_values(own, device=device)
    raised, changed = (next(filter(None, each), None) for each in zip(*found, strict=True))
    if raised is not None:
        raise RuntimeError(
            "The certificate of this layout could not be made: training_step of the module as written raised on a "
            f"batch on which the layout did not: {raised}. If the step cannot run twice on the same batch, type "
            "strategy.certificate=off (in Python certificate='off')."
        ) from error
    return changed


def _trained(strategy: Compared, written: AsWritten) -> dict[str, bool]:
    """Return whether each parameter is trained, from its holders: ``configure_optimizers`` may freeze some."""
    held = {each.name: strategy.certified.held(each.name) for each in written.parameters}
    own = {name: part.requires_grad for name, part in held.items() if part is not None}
    found = all_gather_values(own, device=strategy.root_device) if dist.is_initialized() else [own]
    return {
        each.name: next((ranks[each.name] for ranks in found if each.name in ranks), each.requires_grad)
        for each in written.parameters
    }


def _units(written: AsWritten, blocks: Sequence[str]) -> list[list[str]]:
    """Return names of parameters outside of the blocks or in several, then those of each block."""
    inside: dict[str, int] = {}
    for each in written.parameters:
        places = {_block_of(owner, key, written, blocks) for owner, key in each.slots}
        inside[each.name] = places.pop() if len(places) == 1 else 0
    return [[name for name, unit in inside.items() if unit == number] for number in range(len(blocks) + 1)]


def _block_of(owner: nn.Module, key: str, written: AsWritten, blocks: Sequence[str]) -> int:
    name = written.name_of(owner)
    return next((i for i, block in enumerate(blocks, 1) if name == block or name.startswith(f"{block}.")), 0)


# ---- results of all ranks --------------------------------------------------------------------------------------------

# Number of compared losses in manual optimization.
_LOSSES = 4


def _gather_results(
    strategy: Compared, parameters: Sequence[WrittenParameter], layout: Trial, plain: Trial | None
) -> Found:
    """Gather the results of all ranks by one all-reduce."""
    ranks, names = strategy.ranks.num_data_ranks, all_gather_values(sorted(layout.logged), device=strategy.root_device)
    logged = sorted(set(names[0]).intersection(*names))  # some ranks may log more, such as rank 0
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
            micro_batches = strategy.lightning_module.trainer.accumulate_grad_batches
            table[row, WIDTH : 2 * WIDTH] = plain.gradients[each.name] * micro_batches / ranks
        # In manual optimization, gradients are complete only for the optimizer that steps.
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


# ---- outputs of modules, to find the first that differs -------------------------------------------------------------

_SUM, _SQUARES, _COUNT, _ORDER = range(4)


class Outputs:
    """Mean and mean square of each module's output, recorded within :meth:`listening`.

    They are sums over parts, micro-batches and slices of a sequence, hence independent of the split.

    Args:
        places: id of a module -> its row in :attr:`table`; others are ignored.
        count: number of rows.

    Attributes:
        table: sum, sum of squares, number of elements of each module's outputs, and the 1-based index of its first
            call, ``(count, 4)``.
    """

    def __init__(self, places: Mapping[int, int], count: int) -> None:
        self._places = places
        self.table = torch.zeros(count, 4, dtype=torch.float64)
        self._calls = 0

    def listening(self) -> AbstractContextManager[Any]:
        """Record outputs in a ``with`` block."""
        return register_module_forward_hook(self._record)

    def _record(self, module: nn.Module, _: Any, output: Any) -> None:
        place = self._places.get(id(module))
        if place is None or torch._C._current_graph_task_id() != -1:  # recomputation in backward
            return
        row = self.table[place]
        self._calls += 1
        row[_ORDER] = row[_ORDER] or self._calls
        for tensor in pytree.tree_leaves(output):
            if type(tensor) is Tensor and tensor.is_floating_point() and tensor.numel():
                values = tensor.detach().double()
                row[_SUM] += values.sum().cpu()
                row[_SQUARES] += values.square().sum().cpu()
                row[_COUNT] += values.numel()


def first_that_differs(layout: Outputs, plain: Outputs, allowed: float, device: torch.device) -> int | None:
    """Return the row of the first module, in call order, whose outputs differ; ``None``: none. A collective.

    Args:
        layout: of every rank.
        plain: of ranks that ran the module as written; empty on others.
        allowed: relative difference explained by rounding.
        device: for the collective.
    """
    order = plain.table[:, _ORDER].clone() if dist.get_rank() == 0 else torch.zeros(len(plain.table))
    sent = torch.cat([layout.table[:, :3], plain.table[:, :3], order.double()[:, None]], 1).to(device)
    dist.all_reduce(sent)
    sent = sent.cpu()
    one, other, order = sent[:, :3], sent[:, 3:6], sent[:, 6]
    both = (one[:, _COUNT] > 0) & (other[:, _COUNT] > 0)
    (mean, square), (mean_plain, square_plain) = _moments(one), _moments(other)
    size = square_plain.sqrt() + 1e-12
    differs = ((mean - mean_plain).abs() > allowed * size) | (
        (square.sqrt() - square_plain.sqrt()).abs() > allowed * size
    )
    places = torch.nonzero(both & (differs | size.isnan()) & (order > 0)).flatten().tolist()
    return min(places, key=lambda place: float(order[place]), default=None)


def _moments(table: Tensor) -> tuple[Tensor, Tensor]:
    count = table[:, _COUNT].clamp(min=1)
    return table[:, _SUM] / count, table[:, _SQUARES] / count
