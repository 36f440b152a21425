"""One micro-batch of training: reading, forward, backward, and the optimizer step if due."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from trainwright.callbacks.guard.verdict import DropStep
from trainwright.core.lightning_internals import (
    _AutomaticOptimization,
    _block_parallel_sync_behavior,
    _DataFetcher,
    _ManualOptimization,
    _MaxSizeCycle,
    _MockOptimizer,
    _PrefetchDataFetcher,
)
from trainwright.core.run.hooks import HookTable
from trainwright.core.run.phases import BACKWARD, FORWARD, OPTIMIZER, Phases
from trainwright.core.run.traits import Traits
from trainwright.strategies.pipeline.zero_grad_first import ZeroGradFirst
from trainwright.trainer.data.reading import SideBySide, Weigher
from trainwright.trainer.loop.loss_weighting import TokenWeights

_MANUAL = "A module that steps its optimizers by itself sets self.automatic_optimization = False."


def reader_of(fetcher: _DataFetcher) -> Callable[[Any], Any]:
    """Return a function that returns the next batch of a started ``fetcher``, or raises ``StopIteration``.

    A single loader of known length is read directly, without the four frames of Lightning that combine several.
    """
    combined: Any = fetcher.combined_loader
    alone = combined.flattened == [combined.iterables] and type(combined._iterator) is _MaxSizeCycle
    if alone and type(fetcher) is _PrefetchDataFetcher and fetcher.length is not None:
        return _next_of_one
    return lambda any_fetcher: next(any_fetcher)[0]


def _next_of_one(fetcher: Any) -> Any:
    if fetcher.done:
        raise StopIteration
    loaders = fetcher.combined_loader._iterator
    try:
        batch = next(loaders.iterators[0])
    except StopIteration:
        fetcher.done = True
        raise
    loaders._idx += 1
    fetcher.fetched += 1
    fetcher.done = fetcher.fetched >= fetcher.length
    return batch


def is_on_device(batch: Any, device: torch.device) -> bool:
    """Return whether ``batch`` is a tensor, or a plain list, tuple or dict of tensors, on ``device`` already."""
    if isinstance(batch, Tensor):
        return batch.device == device
    items = batch.values() if type(batch) is dict else batch if type(batch) in (list, tuple) else ()
    return bool(items) and all(isinstance(item, Tensor) and item.device == device for item in items)


class LossDivisor:
    """Divisor of a micro-batch's loss that makes gradients means over the samples of the whole optimizer step."""

    def __init__(self, dealer: Weigher | SideBySide | None, accumulation: int, whole_step: bool) -> None:
        self._dealer = dealer
        self._accumulation = accumulation
        self.whole_step = whole_step
        self._regular = float("inf") if dealer is None else dealer.regular_waves

    def is_regular(self, batch_idx: int) -> bool:
        """Return whether all ranks have all samples of the ``batch_idx``-th micro-batch, so that weights are 1."""
        return self._dealer is None or batch_idx < self._regular

    def is_even(self, batch_idx: int) -> bool:
        """Return whether all ranks are known to have equally many samples in the ``batch_idx``-th micro-batch."""
        return self._dealer is not None and batch_idx < self._regular

    def divisor(self, batch_idx: int) -> float:
        """Return the divisor for the ``batch_idx``-th micro-batch: the accumulation, unless samples are missing."""
        if self._dealer is None or batch_idx < self._regular:
            return self._accumulation
        return self._dealer.loss_divisor(batch_idx, self._accumulation, self.whole_step)

    def weight(self, batch_idx: int) -> float:
        """Return the factor of this rank's mean of a micro-batch that turns the mean over ranks into one over
        samples.
        """
        if self._dealer is None or batch_idx < self._regular:
            return 1.0
        return 1 / self._dealer.loss_divisor(batch_idx, 1, False)


class LeanOptimization(_AutomaticOptimization):
    """Lightning's forward, zero_grad, backward and optimizer step, with an exact divisor of the loss."""

    loss_divisor: LossDivisor | None = None
    token_weights: TokenWeights | None = None
    hooks: HookTable
    phases: Phases
    # True if a step of the epoch returned a loss, False if one did not: one, both or neither.
    losses: set[bool]
    _closure: _LeanClosure

    def begin(self, hooks: HookTable, loss_divisor: LossDivisor, token_weights: TokenWeights | None) -> None:
        """Begin an epoch."""
        self.hooks, self.loss_divisor, self.token_weights = hooks, loss_divisor, token_weights
        self._closure = _LeanClosure(self)
        # What steps before a resume returned is unknown.
        self.losses = {True} if self.trainer.fit_loop.epoch_loop.batch_progress.current.ready else set()

    def refuse_no_loss(self, batches: int) -> None:
        """Raise if no step of an epoch with this number of micro-batches returned a loss.

        Several ranks need no agreement: there, the first step without a loss is refused.

        Raises:
            RuntimeError: unless there is no optimizer, either.
        """
        if self.losses == {False} and not all(isinstance(each, _MockOptimizer) for each in self.trainer.optimizers):
            raise RuntimeError(
                f"`training_step` returned None for all {batches} micro-batches of the epoch, so no weight was "
                f"updated. Return the loss. {_MANUAL}"
            )

    def run_lean(self, optimizer: Optimizer, batch_idx: int, args: tuple[Any, ...], stepping: bool) -> dict[str, Any]:
        """Run like :meth:`run`, without looking up hooks that are not overridden."""
        closure, strategy = self._closure, self.trainer.strategy
        closure.take(optimizer, batch_idx, args)
        try:
            if stepping or strategy.handles_gradient_accumulation:
                self._step_lean(optimizer, batch_idx, closure, stepping)
            else:
                with _block_parallel_sync_behavior(strategy, block=True):
                    closure()
        finally:  # after an error, too: a graph that is kept would keep groups, for which other ranks wait
            result = closure.give_back()
        if result is None:
            raise MisconfigurationException(
                "The closure hasn't been executed: optimizer_step of the module, or step of the optimizer, did not "
                "call it, so nothing is trained. Call optimizer.step(closure), or the closure itself."
            )
        return {} if result.loss is None else {"loss": result.loss, **result.extra}

    def _step_lean(
        self, optimizer: Optimizer, batch_idx: int, closure: Callable[[], Tensor | None], stepping: bool
    ) -> None:
        trainer, progress = self.trainer, self.optim_progress.optimizer.step
        module = trainer.lightning_module
        total: Any = progress.total
        current: Any = progress.current
        if stepping:
            total.ready, current.ready = total.ready + 1, current.ready + 1
        names = module.__dict__
        before, names["_current_fx_name"] = names["_current_fx_name"], "optimizer_step"
        try:
            if "optimizer_step" in self.hooks.heard:
                wrapped = trainer.strategy._lightning_optimizers[0]
                module.optimizer_step(trainer.current_epoch, batch_idx, wrapped, closure)
            else:
                trainer.strategy.optimizer_step(optimizer, closure)
        except DropStep:
            self._drop()
        else:
            if stepping:
                total.completed, current.completed = total.completed + 1, current.completed + 1
        names["_current_fx_name"] = before

    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Tensor | None]) -> None:
        # Lightning's path.
        try:
            super()._optimizer_step(batch_idx, train_step_and_backward_closure)
        except DropStep:
            self._drop()

    def _drop(self) -> None:
        """Drop the step on request of a callback; nothing has changed yet."""
        trainer: Any = self.trainer
        progress = self.optim_progress.optimizer.step
        for tracker in (progress.current, progress.total):
            tracker.ready -= 1  # else it would count as interrupted
        reset_unscaled(trainer)
        trainer.fit_loop.skip_steps(1)
        trainer.fit_loop.epoch_loop.dropped = True

    def _make_closure(self, kwargs: Any, optimizer: Optimizer, batch_idx: int) -> Closure:
        first = getattr(self.trainer.strategy, "traits", Traits).backward_in_step
        make = ZeroGradFirst._make_closure if first else _AutomaticOptimization._make_closure
        return make(self, kwargs, optimizer, batch_idx)  # type: ignore[arg-type]

    def _training_step(self, kwargs: Any) -> ClosureResult:
        # Lightning's path (with a profiler, or dataloader_iter), with our divisor of the loss.
        if self.loss_divisor is not None:
            strategy: Any = self.trainer.strategy
            strategy.loss_divisor = self.loss_divisor.divisor(self.trainer.fit_loop.batch_idx)
        batch_idx = self.trainer.fit_loop.batch_idx
        loop: Any = self.trainer.fit_loop.epoch_loop
        with self.observed(next(iter(kwargs.values())), batch_idx), loop.padded_or_weighted(batch_idx):
            result = super()._training_step(kwargs)
        self.losses.add(result.closure_loss is not None)
        loss, divisor = result.closure_loss, float(self.trainer.accumulate_grad_batches)
        if self.loss_divisor is not None and loss is not None:
            exact = self.loss_divisor.divisor(batch_idx)
            if exact != divisor:
                result.closure_loss = loss * (divisor / exact)
                result._clone_loss()
            loss, divisor = loss * divisor, exact
        self.apply_weights(result, loss, divisor)
        return result

    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        backward = super()._make_backward_fn(optimizer)
        if backward is None or self.token_weights is None:
            return backward

        def backward_and_correct(loss: Tensor) -> None:
            backward(loss)
            self.correct_gradients()

        return backward_and_correct

    # ---- loss_weighting="tokens" ----------------------------------------------------------------------------------

    def observed(self, batch: Any, batch_idx: int) -> AbstractContextManager[Any]:
        """Return a context for ``training_step`` that counts its tokens, if losses are weighted by them."""
        weights = self.token_weights
        if weights is None:
            return nullcontext()
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            weights.begin()
        # A strategy that runs backward within the step weights its own micro-batches.
        return nullcontext() if weights.strategy.traits.backward_in_step else weights.observe(batch)

    def apply_weights(self, result: ClosureResult, output: Any, divisor: float) -> None:
        """Replace the loss by the one weighted by its tokens, before backward."""
        if self.token_weights is None or self._skip_backward or output is None:
            return
        if not self.token_weights.strategy.traits.backward_in_step:
            self.token_weights.apply(result, output, padding=divisor == float("inf"))
        if not self.trainer.fit_loop._should_accumulate():
            self.token_weights.start()

    def correct_gradients(self) -> None:
        """Rescale gradients to the mean over all tokens of a step, after its last backward."""
        if self.token_weights is not None and not self.trainer.fit_loop._should_accumulate():
            self.token_weights.finish()


class WeightedManual(_ManualOptimization):
    """Lightning's manual optimization, with this rank's weight in losses and logged values."""

    def run(self, kwargs: Any) -> Any:
        """See Lightning's. The user calls backward; the strategy weights the loss of a rank with fewer samples."""
        trainer: Any = self.trainer
        batch_idx, loop, strategy = trainer.fit_loop.batch_idx, trainer.fit_loop.epoch_loop, trainer.strategy
        strategy.loss_factor = trainer.accumulate_grad_batches / loop.automatic_optimization.loss_divisor.divisor(
            batch_idx
        )
        with loop.padded_or_weighted(batch_idx):
            return super().run(kwargs)


class _LeanClosure:
    """Forward, zero_grad and backward of the micro-batches of an epoch, of one at a time."""

    _optimizer: Optimizer
    _batch_idx: int

    def __init__(self, loop: LeanOptimization) -> None:
        trainer: Any = loop.trainer
        self._loop, self._trainer = loop, trainer
        self._module, self._strategy = trainer.lightning_module, trainer.strategy
        # Absent on Lightning's own strategies.
        self._zeroes_first = getattr(trainer.strategy, "traits", Traits).backward_in_step
        self._progress: Any = loop.optim_progress.optimizer.zero_grad
        self._args: tuple[Any, ...] = ()
        self._result: ClosureResult | None = None

    def take(self, optimizer: Optimizer, batch_idx: int, args: tuple[Any, ...]) -> None:
        """Take the next micro-batch."""
        self._optimizer, self._batch_idx, self._args, self._result = optimizer, batch_idx, args, None

    def give_back(self) -> ClosureResult | None:
        """Return the result, if the closure was called, and hold nothing of the micro-batch any more."""
        result, self._result, self._args = self._result, None, ()
        return result

    def __call__(self) -> Tensor | None:
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self()
        loop, strategy, names = self._loop, self._strategy, self._module.__dict__
        divisor = loop.loss_divisor.divisor(self._batch_idx)  # type: ignore[union-attr]
        zeroes_first = self._zeroes_first
        if zeroes_first:
            strategy.loss_divisor = divisor
            self._zero_grad(names)
        before, names["_current_fx_name"] = names["_current_fx_name"], "training_step"
        loop.phases.begin(FORWARD)
        if loop.token_weights is None:
            output = strategy.training_step(*self._args)
        else:
            with loop.observed(self._args[0], self._batch_idx):
                output = strategy.training_step(*self._args)
        names["_current_fx_name"] = before
        loop.losses.add(output is not None)
        if output is None:
            _refuse_none(self._trainer)
        if zeroes_first:  # after the step, which may read what the hook updates
            self._before_zero_grad()
        self._result = result = _scaled(output, divisor)
        if loop._skip_backward:
            return result.loss
        if not zeroes_first:
            self._before_zero_grad()
            self._zero_grad(names)
        loop.apply_weights(result, output, divisor)
        if result.closure_loss is not None:
            loop.phases.begin(BACKWARD)
            names["_current_fx_name"] = "backward"
            try:
                strategy.backward(result.closure_loss, self._optimizer)
            except RuntimeError as error:
                loss, what = result.closure_loss, "`training_step` must return one number that depends on weights"
                if loss.numel() != 1 or not loss.requires_grad:
                    given = f"a tensor of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}"
                    error.args = (f"{what}, such as loss.mean() without detach(), not {given} ({error}).",)
                raise
            names["_current_fx_name"] = before
        loop.correct_gradients()
        loop.phases.begin(OPTIMIZER)
        return result.loss

    def _before_zero_grad(self) -> None:
        if "on_before_zero_grad" in self._loop.hooks.heard and not self._accumulates():
            self._loop.hooks.call("on_before_zero_grad", self._optimizer)

    def _zero_grad(self, names: dict[str, Any]) -> None:
        if self._accumulates():
            return
        total, current = self._progress.total, self._progress.current
        total.ready, current.ready = total.ready + 1, current.ready + 1
        total.started, current.started = total.started + 1, current.started + 1
        before, names["_current_fx_name"] = names["_current_fx_name"], "optimizer_zero_grad"
        self._module.optimizer_zero_grad(self._trainer.current_epoch, self._batch_idx, self._optimizer)
        names["_current_fx_name"] = before
        total.completed, current.completed = total.completed + 1, current.completed + 1

    def _accumulates(self) -> bool:
        return bool(self._batch_idx % self._trainer.accumulate_grad_batches)


def reset_unscaled(trainer: Trainer) -> None:
    """Reset the gradient scaler, which would otherwise wait for the step of the gradients that it has unscaled."""
    forget = getattr(getattr(trainer.precision_plugin, "scaler", None), "forget_unscaled", None)
    if forget is not None:
        forget()


def _scaled(output: Any, divisor: float) -> ClosureResult:
    if divisor == 1 and isinstance(output, Tensor):
        return ClosureResult(output)  # saves an operation
    try:
        return ClosureResult.from_training_step_output(output, divisor)  # type: ignore[arg-type]
    except MisconfigurationException as error:
        error.args = (f"training_step returned {' '.join(repr(output).split()):.200}: {error}",)
        raise


def _refuse_none(trainer: Trainer) -> None:
    if trainer.world_size > 1:
        raise RuntimeError(
            "`training_step` returned None, which is not supported on several ranks: if only one did, the others would "
            "wait for its gradients. Return a loss without effect instead, for example "
            f"0 * sum(p.sum() for p in self.parameters()). {_MANUAL}"
        )
    rank_zero_warn("`training_step` returned `None`: no optimizer step is made for this batch.")
