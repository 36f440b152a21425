"""The training loop: Lightning's behaviour without its cost per step.

One epoch, with every hook in its place (callbacks before the module):

    on_train_epoch_start
    for each micro-batch:
        on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer
        on_train_batch_start                      # -1 ends the epoch
        if a new optimizer step begins after forward: on_before_zero_grad, optimizer_zero_grad
        training_step                             # before zero_grad, as in Lightning
        on_before_backward, backward, on_after_backward
        if the optimizer steps (optimizer_step surrounds all of the above):
            on_before_optimizer_step, configure_gradient_clipping, the step itself
        lr_scheduler_step
        on_train_batch_end
        if due: the validation loop
    on_train_epoch_end

Unlike Lightning's loop this one runs no collective per step: Lightning broadcasts a SIGTERM flag, which synchronizes
asynchronous workers and hangs ranks of unequal length. Here ranks agree on the signal from time to time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.precision.precision import Precision as FabricPrecision
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric

from trainwright.core.lightning_internals import _DataFetcher, _DataLoaderIterDataFetcher, _TrainingEpochLoop
from trainwright.core.run.hooks import HookTable
from trainwright.core.run.peers import peers_of
from trainwright.core.run.phases import DATA, HOOKS, IDLE, VALIDATION, Phases
from trainwright.strategies.plan.module_state import ModuleState
from trainwright.trainer.data.reading import common_weigher, dealer_of
from trainwright.trainer.loop.loss_weighting import refuse_impossible
from trainwright.trainer.loop.monitored import MonitoredValues
from trainwright.trainer.loop.optimization import (
    LeanOptimization,
    LossDivisor,
    WeightedManual,
    is_on_device,
    reader_of,
    reset_unscaled,
)
from trainwright.trainer.loop.remembered_logs import RememberedLogs, collect_entries, without_weight
from trainwright.trainer.loop.results import LeanResults, RepeatedLog

if TYPE_CHECKING:
    from trainwright.trainer.leases.batches import LeasedBatchSampler


class LeanEpochLoop(_TrainingEpochLoop):
    """One training epoch; with the hooks, results and progress of Lightning's loop."""

    trainer: Any  # Lightning's connectors set most of its attributes dynamically
    automatic_optimization: LeanOptimization
    _results: LeanResults

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self.automatic_optimization = LeanOptimization(trainer)
        self.manual_optimization = WeightedManual(trainer)
        self.phases = self.automatic_optimization.phases = Phases()
        self._results = LeanResults(training=True)
        self._lean = False
        self._validates = self._plateaus = True
        self._interval = ""  # of the schedulers that are updated
        self._step_takes_index = True
        self._moves_batch = True
        self._in_batch = False
        # Whether the present micro-batch ends with an optimizer step.
        self._steps = False
        # Whether reading the epoch's loaders has started; and whether it had in the saved run.
        self.reading = self.was_reading = False
        # Whether the run was saved within the end of a batch, the rest of which is pending.
        self.owes_end_of_batch = False
        # Whether the optimizer step of the present micro-batch was dropped.
        self.dropped = False
        self._logs = RememberedLogs()
        self._monitored = MonitoredValues(trainer, self._results)  # type: ignore[arg-type]
        self._leased: LeasedBatchSampler | None = None

    # ---- per epoch ------------------------------------------------------------------------------------------------

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Prepare the steps of this epoch."""
        loaders = self.trainer.fit_loop._combined_loader.flattened
        loader = loaders[0] if len(loaders) == 1 else None
        dealer = None if loader is None else dealer_of(loader)
        trainer = self.trainer
        reads_anew = trainer.current_epoch > 0 and not trainer.fit_loop.is_resuming and not self.restarting
        self._leased = trainer.fit_loop.leased
        if self._leased is not None:
            self._leased.is_open = reads_anew
        super().on_run_start(data_fetcher)
        if self._leased is not None and not reads_anew:
            self._leased.is_open = True
            iter(data_fetcher)
        module = trainer.lightning_module
        passes_through = isinstance(trainer.profiler, PassThroughProfiler)
        self._lean = passes_through and not isinstance(data_fetcher, _DataLoaderIterDataFetcher)
        # Also if a scheduler monitors a value: both come after the batch.
        self._plateaus = any(config.reduce_on_plateau for config in trainer.strategy.lr_scheduler_configs)
        self._validates = self._should_check_val_epoch() or self._plateaus
        self.hooks = HookTable(trainer)
        if hasattr(trainer.precision_plugin, "hooks"):
            trainer.precision_plugin.hooks = self.hooks if passes_through else None
        loss_divisor = LossDivisor(
            common_weigher(trainer.fit_loop._combined_loader),
            trainer.accumulate_grad_batches,
            # With manual optimization the user defines a step; then each wave counts by itself.
            whole_step=(trainer.global_batch_size is not None or (dealer is not None and dealer.whole_step))
            and module.automatic_optimization,
        )
        if trainer.token_weights is not None:
            refuse_impossible(trainer.token_weights, module)
        self.automatic_optimization.begin(self.hooks, loss_divisor, trainer.token_weights)
        self._step_takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._moves_batch = type(trainer.precision_plugin).convert_input is not FabricPrecision.convert_input or any(
            self.hooks.data_overrides(hook)
            for hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        )
        self._device = trainer.strategy.root_device
        if self._lean:
            data_fetcher._start_profiler = data_fetcher._stop_profiler = lambda: None
            self._next = reader_of(data_fetcher)
        self._restore_random_state(data_fetcher, reads_anew, is_dealt=dealer is not None)
        self.reading = True

    def _restore_random_state(self, data_fetcher: _DataFetcher, reads_anew: bool, is_dealt: bool) -> None:
        """Restore the random state of the saved run; starting to read a loader draws a number too."""
        state: Any = getattr(self.trainer.strategy, "state", None)  # absent on Lightning's own strategies
        if state is None or state.pending is None:
            return
        has_started = self.batch_progress.current.ready > 0
        if not has_started and not reads_anew and is_dealt:
            iter(data_fetcher)  # not started, or before the state was restored
        if has_started or self.was_reading:
            state.restore()  # the saved run had started the loader
        state.pending = None

    def run(self, data_fetcher: _DataFetcher) -> None:
        """Train one epoch."""
        log_again = RepeatedLog(self.trainer.lightning_module, self.trainer, self._results)
        with log_again.installed():
            try:
                super().run(data_fetcher)
                self.automatic_optimization.refuse_no_loss(self.batch_progress.current.ready)
            finally:
                if self._leased is not None:
                    self._leased.is_open = False
                self.phases.begin(IDLE)

    # ---- leases ---------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """True if the epoch is over."""
        if not self._restarting and not self.trainer.should_stop:
            return self._is_training_done  # Lightning's result, computed once per micro-batch
        return bool(super().done)

    @property
    def _is_training_done(self) -> bool:
        # max_steps counts samples of all workers, not the steps of this one.
        counts = self._leased is None and self.max_steps != -1
        return (counts and self.global_step >= self.max_steps) or bool(self._num_ready_batches_reached())

    def _should_accumulate(self) -> bool:
        accumulates = self.batch_progress.current.ready % self.trainer.accumulate_grad_batches
        return bool(accumulates) and bool(super()._should_accumulate())

    def _settle_leases(self) -> None:
        """Report samples trained on after a micro-batch, and read on if other workers leave some.

        At the end of the run, wait for all others, and synchronize the step count.
        """
        leased, progress = self._leased, self.batch_progress
        if leased is None or leased.has_ended or self._should_accumulate():
            return
        leased.trained(progress.current.ready)
        self.trainer._signal_connector.notify_lessor(leased)
        while (progress.is_last_batch or leased.heard_of_end) and leased.wait_for_more():
            fetcher = self.trainer.fit_loop._data_fetcher
            iter(fetcher)
            progress.is_last_batch = fetcher.done
        if leased.heard_of_end:
            progress.is_last_batch = not leased.has_ended
        if progress.is_last_batch or leased.has_ended:
            # Actions at the end of an epoch depend on the step, so they are equal on all ranks.
            self.set_steps(leased.leases.global_batches)

    def _lease_more(self, leased: LeasedBatchSampler, data_fetcher: _DataFetcher) -> bool:
        """Wait for a returned chunk if none was left for this worker, and return whether there is one.

        Otherwise end the epoch like the other workers.
        """
        while data_fetcher.done and leased.wait_for_more():
            iter(data_fetcher)
        if not data_fetcher.done:
            return True
        self.set_steps(leased.leases.global_batches)
        if leased.has_ended:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            signals = self.trainer._signal_connector
            assert signals.passed(fits=True), "all lessees have received the stop notice"
            signals.end()
        self._batches_that_stepped = max(self._batches_that_stepped, 1)  # loggers count from 0
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        self.batch_progress.is_last_batch = self.dropped = True
        self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        return False

    # ---- per micro-batch ------------------------------------------------------------------------------------------

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Train on one micro-batch.

        Raises:
            StopIteration: if the data or the user (``on_train_batch_start`` returned -1) ended the epoch.
        """
        if self.restarting:
            if self._end_is_pending(data_fetcher):
                self._steps = not self._should_accumulate()
                return
            # Lightning would check again for a validation to end, and count it.
            self._restarting = False
        self.phases.begin(DATA)  # first, so that listeners find the loop between two batches
        self._in_batch = True
        self.dropped = False
        if self._leased is not None and data_fetcher.done and not self._lease_more(self._leased, data_fetcher):
            return
        fit_loop = self.trainer.fit_loop
        if fit_loop.skipped and fit_loop.is_skipped:
            self._skip_batch(data_fetcher)
            return
        if self._lean:
            self._advance(data_fetcher)
        else:
            super().advance(data_fetcher)

    def _advance(self, data_fetcher: _DataFetcher) -> None:
        trainer, hooks, progress = self.trainer, self.hooks, self.batch_progress
        if self.val_loop._restarting:
            self.val_loop.restarting = False  # recursive, and slow
        batch = self._next(data_fetcher)
        self.phases.begin(HOOKS)
        # Counted here rather than by five methods.
        counts: Any = progress.current
        totals: Any = progress.total
        batch_idx = counts.ready
        progress.is_last_batch = data_fetcher.done
        if self._moves_batch or not is_on_device(batch, self._device):
            batch = self._to_device(batch)
        counts.ready, totals.ready = counts.ready + 1, totals.ready + 1
        self._steps = not self._should_accumulate()
        connector = trainer._logger_connector
        # The connector's `on_batch_start`, without its three look-ups of the stage.
        connector._first_loop_iter = connector._first_loop_iter is None
        self._results.batch, self._results.batch_size, self._results.dataloader_idx = batch, None, None
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            outputs: Any = None
        else:
            heard = "on_train_batch_start" in hooks.heard
            response = hooks.call("on_train_batch_start", batch, batch_idx) if heard else None
            trainer.strategy.on_train_batch_start(batch, batch_idx)
            if response == -1:
                progress.increment_by(0, is_last_batch=True)
                progress.increment_processed()
                self._step_schedulers()
                raise StopIteration
            counts.started, totals.started = counts.started + 1, totals.started + 1
            outputs = self._optimize(batch, batch_idx)
        self.phases.begin(HOOKS)
        counts.processed, totals.processed = counts.processed + 1, totals.processed + 1
        if self._leased is not None:
            self._settle_leases()
        if trainer.strategy.lr_scheduler_configs:
            self._step_schedulers()
        if "on_train_batch_end" in hooks.heard:
            hooks.call("on_train_batch_end", outputs, batch, batch_idx)
        if self._results:
            self._record(connector)
        self._results.batch = self._results.batch_size = None
        counts.completed, totals.completed = counts.completed + 1, totals.completed + 1
        if self._results:
            connector.update_train_step_metrics()

    def _skip_batch(self, data_fetcher: _DataFetcher) -> None:
        """Read a micro-batch without training on it."""
        progress = self.batch_progress
        self.val_loop.restarting = False
        next(data_fetcher)
        progress.is_last_batch = data_fetcher.done
        for count in (progress.increment_ready, progress.increment_started, progress.increment_processed):
            count()
        self._settle_leases()
        self.dropped = True
        self._step_schedulers()  # those of epochs
        progress.increment_completed()

    def _end_is_pending(self, data_fetcher: _DataFetcher) -> bool:
        """Return whether a resumed run must first finish a batch, an epoch or a validation."""
        validating = self.val_loop.restarted_mid_evaluation
        if self.owes_end_of_batch:
            self.owes_end_of_batch = False
            self._restarting = self.val_loop.restarting = False
            return True
        if self._num_ready_batches_reached():
            self._skip_next_val = not validating
            return True
        return validating and self._should_check_val_fx(data_fetcher)

    def padded_or_weighted(self, batch_idx: int) -> AbstractContextManager[None]:
        """Return a context for a micro-batch in which what is logged has the weight of this rank's samples."""
        loss_divisor = self.automatic_optimization.loss_divisor
        if loss_divisor is None or loss_divisor.is_regular(batch_idx):
            return nullcontext()
        weight = loss_divisor.weight(batch_idx)
        return self._without_weight() if weight == 0 else self._results.weighted(weight)

    @contextmanager
    def _without_weight(self) -> Iterator[None]:
        # A padding batch only matches collectives, and has no weight in logged values or metrics either.
        metrics = [ModuleState(each) for each in self.trainer.lightning_module.modules() if isinstance(each, Metric)]
        with self._results.padding():
            yield
        for metric in metrics:
            metric.restore()

    def _optimize(self, batch: Any, batch_idx: int) -> Any:
        args = (batch, batch_idx) if self._step_takes_index else (batch,)
        trainer = self.trainer
        if trainer.lightning_module.automatic_optimization:
            with self.padded_or_weighted(batch_idx):
                optimizer = trainer.strategy._optimizers[0]
                return self.automatic_optimization.run_lean(optimizer, batch_idx, args, self._steps)
        return self.manual_optimization.run(dict(enumerate(args)))  # type: ignore[arg-type]

    def _step_schedulers(self) -> None:
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _record(self, connector: Any) -> None:
        # The connector's `on_batch_end`, without its six look-ups of the stage.
        found = self._results.metrics(True)
        connector._progress_bar_metrics.update(found["pbar"])
        connector._callback_metrics.update(found["callback"])
        connector._logged_metrics.update(found["log"])

    def _to_device(self, batch: Any) -> Any:
        trainer = self.trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    # ---- logged values --------------------------------------------------------------------------------------------

    def log_with_others(self) -> None:
        """Let a worker without leased samples join the reductions of logged values at the end of an epoch.
        A collective.
        """
        if self._leased is None:
            return
        mine = collect_entries(self._results, to_save=False)
        of_all = self.trainer.fit_loop.data_ranks.gather(mine)
        if not mine and not self._logs:
            self.remember_logs(without_weight(next(filter(None, of_all), [])))

    def remember_logs(self, entries: Sequence[dict[str, Any]]) -> None:
        """Restore what the saved run had logged of this epoch."""
        self._logs = RememberedLogs(entries)
        self._results.remember(self._logs)

    @contextmanager
    def with_remembered_logs(self) -> Iterator[None]:
        """Add values that the saved run logged, and this one did not, while the epoch ends."""
        if not self._logs:
            yield
            return
        self._logs.restore(self._results, self.trainer.lightning_module, self.trainer.strategy.reduce)
        yield
        self._logs.remove(self._results)
        self.remember_logs([])

    # ---- signals --------------------------------------------------------------------------------------------------

    def _broadcast_sigterm_tensor(self) -> None:
        """Skip Lightning's collective per step; see the module's docstring."""

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Validate if due, and stop if the ranks have agreed to."""
        if self._lean and not self._validates:
            self._end_lean_batch()
        else:
            super().on_advance_end(data_fetcher)
            if self.dropped and not self._should_accumulate():
                self._batches_that_stepped -= 1  # counted as a step before
            self.phases.begin(HOOKS)
        self._in_batch = False
        signals = self.trainer._signal_connector
        # Not at the end of an epoch, which the fit loop must end first, nor within an optimizer step.
        if signals.passed(fits=True) and not self._is_training_done and not self._should_accumulate():
            signals.end()

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        due: bool = super()._should_check_val_fx(data_fetcher)
        if due and self._in_batch:
            self.meet()
            self.phases.begin(VALIDATION)
        return due

    def meet(self) -> None:
        """Synchronize asynchronous ranks; called where all ranks come by."""
        peers_of(self.trainer.strategy).meet()

    def _end_lean_batch(self) -> None:
        self._skip_next_val = False
        # With leased samples the last micro-batch is known only afterwards.
        steps = self._steps if self._leased is None else not self._should_accumulate()
        if steps and not self.dropped:
            self._batches_that_stepped += 1
        if self.trainer.should_stop:
            self._save_loggers_on_train_batch_end()

    def leave_validation(self) -> None:
        """Undo the counts of the current validation, so that a run saved now starts with the whole of it."""
        progress, validated = self.batch_progress, self.val_loop.batch_progress
        if progress.current.completed == progress.current.ready:  # the batch before it ends once more
            progress.total.completed -= 1
            progress.current.completed -= 1
        validated.total.increment_by(-validated.current.ready)
        validated.reset_on_run()
        self._in_batch = True

    # ---- the cursor -----------------------------------------------------------------------------------------------

    @property
    def stepped(self) -> int:
        """Micro-batches of the run that stepped, including the present one once it is optimized."""
        progress: Any = self.batch_progress.current
        uncounted = self._in_batch and progress.processed == progress.ready and not self._should_accumulate()
        return self._batches_that_stepped + (uncounted and not self.dropped)

    def set_steps(self, steps: int) -> None:
        """Set the number of optimizer steps of the run."""
        progress: Any = self.automatic_optimization.optim_progress.optimizer.step.total
        progress.ready = progress.completed = steps

    # ---- rollback -------------------------------------------------------------------------------------------------

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Update schedulers as Lightning does, except those of steps after a dropped one.

        With leased samples, schedulers count global batches of samples that all workers have trained on.
        """
        if update_plateau_schedulers and interval == "step" and self._plateaus:
            self._monitored.see(self.automatic_optimization.loss_divisor, self.batch_idx)  # type: ignore[arg-type]
        self._interval = interval
        if interval == "step" and not self._lean:
            self._settle_leases()  # Lightning calls this after each batch
        if interval == "step" and self._leased is not None and not update_plateau_schedulers:
            for _ in range(0 if self._should_accumulate() else self._leased.leases.global_batches_passed()):
                super().update_lr_schedulers(interval, update_plateau_schedulers)
        elif interval != "step" or not self.dropped:
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _get_monitor_value(self, key: str) -> Any:
        """Return the value of the global batch, the same on all ranks."""
        return self._monitored.agreed(key, super()._get_monitor_value(key), self._interval == "step")

    def abandon(self) -> None:
        """Reset the current epoch before a rollback."""
        trainer = self.trainer
        trainer.lightning_module.__dict__["_current_fx_name"] = None
        self._results.reset_all()
        self.val_loop._results.reset_all()  # type: ignore[attr-defined]
        trainer._logger_connector.reset_results()
        trainer._logger_connector.reset_metrics()
        self.val_loop._has_run = False
        self.dropped = self._in_batch = False
        for optimizer in trainer.strategy.optimizers:
            optimizer.zero_grad()
        trainer.lightning_module.zero_grad()
        reset_unscaled(trainer)

    def reset(self) -> None:
        """Start or resume an epoch."""
        super().reset()
        self._in_batch = False
        self.trainer.fit_loop.mark_epoch_started()
