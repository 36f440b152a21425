"""Values of a whole batch in steps that run once per micro-batch.

One process computes a loss over the whole batch. Where a step divides a sum by a number of valid tokens, draws noise or
counts classes, its micro-batches would compute something else. So each step first runs on the whole batch as a
*rehearsal*: what depends on data only is computed, all else (parameters, activations) is a tensor without values.
Micro-batches then repeat its calls one by one, with its results:

- values of data only, random draws included, are the micro-batch's slices of the whole batch's values;
- sums over samples are contributions to the whole batch's: weighted by its share of the samples, a micro-batch's loss
  adds up to the loss of one process, for any quotient of sums.

What cannot be a contribution (a maximum, a root of a mean, a relation between samples) is reported as a problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchmetrics import MetricCollection

from trainwright.core.torch_internals import FakeTensor, _get_current_function_mode, _pop_mode, _push_mode
from trainwright.core.torch_internals import _pytree as pytree
from trainwright.strategies.contract.cuts import METADATA
from trainwright.strategies.pipeline.tracing import sample_functions as functions
from trainwright.strategies.pipeline.tracing.block_values import (
    READS_NUMBERS,
    READS_VALUES,
    SHAPE_ONLY,
    Call,
    Placeholder,
)
from trainwright.strategies.pipeline.tracing.stand_ins import StandIns
from trainwright.strategies.pipeline.value_spec import tensors_in


class StageDone(Exception):  # noqa: N818 - no error: it leaves the user's step after a stage's last block
    """Raised by the first block after a stage's own; :meth:`PipelineEngine.call` catches it."""


class NotAdditive(Exception):  # noqa: N818 - no error: it leaves the user's step
    """Raised where a micro-batch cannot contribute to the whole batch; :class:`StagePass` catches it."""


class MixedSamplesError(RuntimeError):
    """Raised where code before the blocks selects samples of the whole batch."""

    def __init__(self, function: str) -> None:
        super().__init__(
            f"Before the blocks, training_step mixes samples of the whole batch ({function} with indices that it drew "
            "or sorted), but a pipeline runs that code on micro-batches. Mix samples of the batch itself, before any "
            "module is called on them, or use strategy.micro_batches=1."
        )


class Kind(IntEnum):
    """What a value depends on: nothing, data, parameters, activations of each sample, or their sums over samples."""

    CONSTANT = 0
    DATA = 1
    PARAMETER = 2
    SAMPLES = 3
    SUM = 4
    OTHER = 5


class Rehearsed(NamedTuple):
    """A call of the rehearsal.

    Attributes:
        func: called.
        operators: that it ran.
        writes: whether it returned its first argument.
        shapes: of the tensors it returned.
        values: copies of these, if drawn or computed from several samples of the data.
        numel: elements of its first tensor.
        total: divisor of a mean over class indices.
        numbers: plain arguments that are operands.
        is_sure: whether Python has read no activation, on which numbers may depend.
    """

    func: Any
    operators: functions.Operators
    writes: bool
    shapes: list[tuple[int, ...]]
    values: tuple[Tensor, ...]
    numel: int
    total: Tensor | None
    numbers: tuple[Any, ...]
    is_sure: bool


class Logged(NamedTuple):
    """A logged value of the rehearsal: a number, or ``None`` if it depends on activations; and the batch size given."""

    value: float | None
    batch_size: int | None


class _Marks(dict[int, Any]):
    """Values by tensor, several times as fast as torch's weak dictionaries; entries of dead tensors stay."""

    def __setitem__(self, tensor: Any, value: Any) -> None:
        super().__setitem__(id(tensor), (ref(tensor), value))

    def get(self, tensor: Any, default: Any = None) -> Any:
        """Return the value of a tensor."""
        held = super().get(id(tensor))
        return held[1] if held is not None and held[0]() is tensor else default

    def __contains__(self, tensor: Any) -> bool:
        return self.get(tensor) is not None


class _Paused:
    """Takes a function mode off the stack in a ``with`` block, if it is the innermost."""

    def __init__(self, mode: TorchFunctionMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._is_on = _get_current_function_mode() is self._mode
        if self._is_on:
            _pop_mode()

    def __exit__(self, *_: Any) -> None:
        if self._is_on:
            _push_mode(self._mode)


class _Calls(TorchFunctionMode):
    """Function mode that follows values of the user's own code; it is off within modules and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: Any = _Marks()
        self._positions: Any = _Marks()  # integers that may be indices of samples of the whole batch

    def kind(self, tensor: Tensor) -> Kind:
        """Return what a tensor depends on."""
        known: Kind | None = self._kinds.get(tensor)
        if known is not None:
            return known
        if isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
            return Kind.PARAMETER
        if tensor.requires_grad or isinstance(tensor, Placeholder | FakeTensor):
            return Kind.SAMPLES if tensor.dim() else Kind.SUM
        return Kind.CONSTANT

    def mark(self, value: Any, kind: Kind) -> None:
        """Record what the tensors in ``value`` depend on; a block's single numbers are means over its samples."""
        for tensor in tensors_in(value):
            self._kinds[tensor] = Kind.SUM if kind is Kind.SAMPLES and not tensor.dim() else kind

    def paused(self) -> AbstractContextManager[None]:
        """Turn the mode off in a ``with`` block."""
        return _Paused(self)


class Rehearsal(_Calls):
    """One run of a step on the whole batch, without values of parameters and activations.

    Args:
        stand_ins: of parameters, and outputs of modules.
        blocks: of the module.
        batch: copied by the caller.
        size: its samples.
        is_full: whether it continues after the blocks.

    Attributes:
        calls: in order.
        logs: by name.
        trails: by shapes, the calls of the last stage's micro-batches: function, call of the whole batch (``None``: it
            just runs), and reduction (``""``: none); empty if they depend on more.
        draws: whether user code drew random numbers.
        has_values: whether calls have values or numbers that those of micro-batches may not have.
        problem: why it failed, or ``""``.
    """

    def __init__(self, stand_ins: StandIns, blocks: Sequence[nn.Module], batch: Any, size: int, is_full: bool) -> None:
        super().__init__()
        self.calls: list[Rehearsed] = []
        self.logs: dict[str, Logged] = {}
        self.trails: dict[Any, list[tuple[Any, Rehearsed | None, str]]] = {}
        self.draws, self.problem, self.size = False, "", size
        self.stand_ins, self._blocks, self._is_full = stand_ins, blocks, is_full
        self._in_blocks = self._reads = self.has_values = False
        self.mark(batch, Kind.DATA)

    def run(self, function: Callable[[], Any]) -> None:
        """Run ``function``, which runs the user's step."""
        with self, suppress(StageDone):
            function()

    def block(self, index: int, call: Call, args: Any, kwargs: Any) -> Any:
        """Return the output of a block, without values."""
        if not self._is_full:
            raise StageDone
        self._in_blocks = True
        with self.paused():
            return self.stand_ins.output(self._blocks[index], args, kwargs)

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        """Record a log."""
        is_known = not self._reads and (not isinstance(value, Tensor) or self.kind(value) <= Kind.DATA)
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        size = kwargs.get("batch_size")
        with self.paused():
            number = float(value) if is_known and is_number else None
            self.logs[name] = Logged(number, None if size is None else int(size))

    def unit(self, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        """Return the output of a module with parameters, without values."""
        if isinstance(module, MetricCollection):
            raise RuntimeError("a collection of metrics")
        if id(module) in self.stand_ins.transparent:
            with self.stand_ins.shown():
                return module(*args, **kwargs)
        with self.paused():
            return self.stand_ins.output(module, args, kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, without values if an argument has none, and record it."""
        kwargs = kwargs or {}
        if func in METADATA or functions.is_attribute(func, args):
            return func(*args, **kwargs)
        if func in SHAPE_ONLY:
            args = (torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device), *args[1:])
        given = tensors_in((args, kwargs))
        kind = max(map(self.kind, given), default=Kind.CONSTANT)
        has_values, indexed = kind <= Kind.DATA, args
        if not has_values:
            if func in READS_VALUES:
                self._reads = True
                empty = torch.zeros(args[0].shape, dtype=args[0].dtype)
                return func(empty, *args[1:], **kwargs) if func in READS_NUMBERS else False
            args, kwargs = self.stand_ins.without_values(func, args, kwargs)
            output, ran = self.stand_ins.call(func, args, kwargs)
        else:
            with functions.Operators() as ran:
                output = func(*args, **kwargs)
        if kind is Kind.CONSTANT and not ran.draws:
            return output
        self.draws |= ran.draws
        total = None
        if not has_values:
            if any(each in self._positions for each in ran.indices(indexed)) and not self._in_blocks:
                raise MixedSamplesError(_name(func))
            if ran.draws:  # dropout: it advances the generator
                torch.rand(())
            arguments = functions.loss_arguments(func, args, kwargs)
            total = functions.valid_targets(arguments) if functions.is_class_mean(func, arguments) else None
        found = tensors_in(output)
        is_needed = has_values and (ran.draws or not ran.compute_by_sample(args))
        values = tuple(each.detach().clone() for each in found) if is_needed else ()
        is_write = func is Tensor.__setitem__ or (len(args) > 0 and output is args[0])
        shapes, numbers = [tuple(each.shape) for each in found], _numbers(args) if ran.are_pointwise else ()
        numel = given[0].numel() if given else 0
        self.has_values |= bool(values or numbers)
        self.calls.append(Rehearsed(func, ran, is_write, shapes, values, numel, total, numbers, not self._reads))
        for tensor in (*found, *given[:is_write]):
            self._kinds[tensor] = Kind.DATA if has_values else Kind.SAMPLES
            if values:
                self._positions[tensor] = True
        return output


class Replay(_Calls):
    """One run of a step on a micro-batch, with the values of the whole batch.

    It repeats what was found for an earlier micro-batch of the same shapes, if there is one.

    Args:
        rehearsal: of the whole batch.
        batch: the micro-batch.
        start: its first sample.
        size: its samples.
        ends: whether this stage computes the loss; a problem then ends this run of the step.

    Attributes:
        problem: the first call that cannot be a contribution to the whole batch's, or ``""``.
        repeats: whether it repeats an earlier micro-batch.
    """

    def __init__(self, rehearsal: Rehearsal, batch: Any, start: int, size: int, ends: bool) -> None:
        super().__init__()
        self._rehearsal, self._ends, self._next, self.problem = rehearsal, ends, 0, rehearsal.problem
        self._start, self._size, self._whole, self._how = start, size, rehearsal.size, ""
        self._ragged: Any = _Marks()
        self._shapes = (size, *(tensor.shape for tensor in tensors_in(batch)))
        self._trail = rehearsal.trails.setdefault(self._shapes, []) if ends else []
        self.repeats = bool(self._trail)
        self.mark(batch, Kind.DATA)

    def unit(self, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        """Run a module with parameters."""
        if id(module) in self._rehearsal.stand_ins.transparent:
            return call(*args, **kwargs)
        with self.paused():
            output = call(*args, **kwargs)
        self.mark(output, Kind.SAMPLES)
        return output

    def contributes(self, value: Any) -> bool:
        """Return whether a value, weighted by shares of samples, adds up to the whole batch's."""
        return self.repeats or not isinstance(value, Tensor) or self.kind(value) not in (Kind.OTHER, Kind.SAMPLES)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and return what the whole batch's call means for this micro-batch."""
        kwargs = kwargs or {}
        if func in METADATA or self.problem:
            return func(*args, **kwargs)
        if self.repeats:
            return self._repeated(func, args, kwargs)
        self._trail.append((func, None, ""))
        if functions.is_attribute(func, args):
            return func(*args, **kwargs)
        try:
            return self._replayed(func, args, kwargs)
        except NotAdditive:
            if self._ends:
                raise
            return func(*args, **kwargs)

    def _repeated(self, func: Any, args: Any, kwargs: Any) -> Any:
        known, call, how = self._trail[self._next] if self._next < len(self._trail) else (None, None, "")
        self._next += 1
        if known != func:
            self.stop(f"a micro-batch calls {_name(func)} where one before calls {_name(known)}")
        if call is None:
            return func(*args, **kwargs)
        args = _with_numbers(args, call.numbers)
        return self._reduced(call, how, func, args, kwargs) if how else self._of_data(call, func, args, kwargs)

    def _replayed(self, func: Any, args: Any, kwargs: Any) -> Any:
        needed, calls, self._how = args[1:] if func in SHAPE_ONLY else args, self._rehearsal.calls, ""
        given = tensors_in((needed, kwargs) if kwargs else needed)
        kinds = [self.kind(tensor) for tensor in given]
        kind = max(kinds, default=Kind.CONSTANT)
        call = calls[self._next] if self._next < len(calls) else None
        is_same = call is not None and call.func == func
        if func in READS_VALUES or self._ragged or (call is not None and call.operators.draws):
            self._rehearsal.trails[self._shapes] = []
        if kind > Kind.DATA and func in READS_VALUES:
            return func(*args, **kwargs)
        if kind is Kind.CONSTANT and not (call is not None and is_same and call.operators.draws):
            return func(*args, **kwargs)
        if call is None or not is_same:
            self.stop(f"a micro-batch calls {_name(func)} where the whole batch calls {_name(call and call.func)}")
        self._next += 1
        if call.numbers and not call.is_sure and call.numbers != _numbers(args):
            self.stop("Python reads a value of activations")
        args = _with_numbers(args, call.numbers)
        if kind <= Kind.DATA:
            output, kind = self._of_data(call, func, args, kwargs), Kind.DATA
        else:
            output, kind = self._of_activations(call, func, args, kwargs, given, kinds)
        for tensor in (*tensors_in(output), *given[: call.writes]):
            self._kinds[tensor] = kind
        self._trail[-1] = (func, call, self._how)
        return output

    def stop(self, problem: str) -> NoReturn:
        """End this run of the step."""
        self.problem = problem
        raise NotAdditive(problem)

    # ---- values of data -----------------------------------------------------------------------------------------

    def _of_data(self, call: Rehearsed, func: Any, args: Any, kwargs: Any) -> Any:
        if not call.values:
            return func(*args, **kwargs)
        # Indices of the whole batch, such as a permutation, are out of the bounds of a micro-batch.
        output = self._rehearsal.stand_ins.without_running(lambda: func(*args, **kwargs))
        shapes = [tuple(tensor.shape) for tensor in tensors_in(output)]
        parts = [self._slice(*pair) for pair in zip(call.values, shapes, strict=True)]
        if any(part is None for part in parts):
            self.stop(f"{_name(func)} relates samples of the data to each other")
        for part in parts:
            self._positions[part] = True
        if call.writes:
            return args[0].detach().copy_(parts[0])
        return pytree.tree_map_only(Tensor, lambda _: parts.pop(0), output)

    def _slice(self, whole: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """Return the samples of this micro-batch, the whole if its shape is that, or ``None``."""
        if tuple(whole.shape) == shape:
            return whole.clone()
        if whole.dim() != len(shape):
            return None
        dims = [dim for dim, length in enumerate(shape) if whole.shape[dim] != length]
        rows, rest = divmod(shape[dims[0]], self._size)
        if len(dims) > 1 or rest or whole.shape[dims[0]] != rows * self._whole:
            return None
        return whole.narrow(dims[0], rows * self._start, shape[dims[0]])

    # ---- values of activations ----------------------------------------------------------------------------------

    def _of_activations(
        self, call: Rehearsed, func: Any, args: Any, kwargs: Any, given: list[Tensor], kinds: list[Kind]
    ) -> tuple[Any, Kind]:
        """Return the output, and what it depends on."""
        if any(each in self._positions for each in call.operators.indices(args)):
            self.stop(f"{_name(func)} selects samples of the whole batch")
        if max(kinds) < Kind.SUM and call.total is not None and call.shapes == [()] and Kind.SAMPLES in kinds:
            return self._reduced(call, "class mean", func, args, kwargs), Kind.SUM
        output = func(*args, **kwargs)
        found = tensors_in(output)
        if max(kinds) >= Kind.SUM:
            sums = {id(each) for each, kind in zip(given, kinds, strict=True) if kind is Kind.SUM}
            is_linear = max(kinds) is Kind.SUM and Kind.SAMPLES not in kinds
            is_linear &= call.operators.are_linear(args, lambda each: id(each) in sums)
            return output, Kind.SUM if is_linear and all(each.is_floating_point() for each in found) else Kind.OTHER
        has_samples = Kind.SAMPLES in kinds
        is_ragged = any(tensor in self._ragged for tensor in given) or call.operators.select_by_mask(args)
        same = [tuple(each.shape) == shape for each, shape in zip(found, call.shapes, strict=True)]
        if not has_samples and all(same):
            return output, Kind.PARAMETER
        loss = functions.loss_arguments(func, args, kwargs).get("reduction", "")
        reduction = call.operators.reduction or {"batchmean": "mean", "none": ""}.get(loss, loss)
        if has_samples and same == [True] and reduction and (call.shapes == [()] or not is_ragged):
            return self._reduced(call, reduction, lambda *_, **__: output, args, kwargs), Kind.SUM
        if is_ragged:
            for each in found:
                self._ragged[each] = True
            return output, Kind.SAMPLES if all(each.dim() for each in found) else Kind.OTHER
        if any(same):
            return output, Kind.OTHER
        pairs = zip(found, call.shapes, strict=True)
        if any(each.numel() * self._whole != math.prod(shape) * self._size for each, shape in pairs):
            self.stop(f"{_name(func)} relates samples to each other")
        return output, Kind.SAMPLES

    def _reduced(self, call: Rehearsed, how: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a reduction over a micro-batch such that, weighted by its share, it adds up to the whole batch's."""
        self._how = how
        share = self._size / self._whole
        if call.total is not None:  # a mean over class indices
            loss = func(**{**functions.loss_arguments(func, args, kwargs), "reduction": "sum"})
            return loss * (1 / share / call.total).to(loss.dtype)
        output, reduced = func(*args, **kwargs), tensors_in((args, kwargs))[0]
        if how == "sum":
            return output / share
        if reduced.numel() == 0:
            return reduced.sum() / share  # with a gradient; the mean of nothing is NaN
        part = reduced.numel() / call.numel
        return output if part == share else output * (part / share)


def _numbers(args: Any) -> tuple[Any, ...]:
    found = tuple(each if isinstance(each, int | float) else None for each in args)
    return found if any(each is not None for each in found) else ()


def _with_numbers(args: tuple[Any, ...], numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each if n is None else n for each, n in zip(args, numbers, strict=False)) if numbers else args


def _name(func: Any) -> str:
    return "nothing" if func is None else getattr(func, "__name__", str(func))
