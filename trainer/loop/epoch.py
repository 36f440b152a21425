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

Unlike Lightning's loop this one runs no collective of its own at every step: Lightning broadcasts a SIGTERM flag, which
ties asynchronous workers together and hangs ranks of unequal length. Here ranks agree on the signal every so often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.precision.precision import Precision as FabricPrecision
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from trainwright.core.lightning_internals import _DataFetcher, _DataLoaderIterDataFetcher, _TrainingEpochLoop
from trainwright.core.run.hooks import HookTable
from trainwright.core.run.peers import peers_of
from trainwright.core.run.phases import DATA, HOOKS, IDLE, VALIDATION, Phases
from trainwright.trainer.data.reading import Dealer, Weigher, dealer_of, weigher_of
from trainwright.trainer.loop.loss_weighting import refuse_impossible
from trainwright.trainer.loop.optimization import LeanOptimization, LossDivisor, forget_scaled, is_there, reader_of
from trainwright.trainer.loop.remembered_logs import Entry, RememberedLogs, collected, without_weight
from trainwright.trainer.loop.results import LeanResults, RepeatedLog

if TYPE_CHECKING:
    from trainwright.trainer.leases.batches import LeasedBatchSampler


class LeanEpochLoop(_TrainingEpochLoop):
    """One epoch of training; same hooks, results and progress as Lightning's."""

    trainer: Any  # Lightning's connectors give a Trainer most of its attributes, out of sight of type checkers
    automatic_optimization: LeanOptimization
    _results: LeanResults

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self.automatic_optimization = LeanOptimization(trainer)
        self.phases = self.automatic_optimization.phases = Phases()
        self._results = LeanResults(training=True)
        self._lean = False
        self._validates = True
        self._step_takes_index = True
        self._moves_batch = True
        self._in_batch = False
        # Whether the present micro-batch ends with the step of the optimizer.
        self._steps = False
        # Whether the loaders of the epoch have been begun; and, resuming, whether they had been when the run was saved.
        self.reading = self.was_reading = False
        # Resuming: whether the run was saved within the end of a batch, of which the rest is still to come.
        self.owes_end_of_batch = False
        # Whether the present micro-batch made no step that it should have made.
        self.dropped = False
        self._logs = RememberedLogs()
        self._leased: LeasedBatchSampler | None = None

    # ---- once an epoch --------------------------------------------------------------------------------------------

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Find out, once, what the steps of this epoch need."""
        dealer = self._only_dealer()
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
        # Also when a scheduler waits for a monitored value: both come after the batch has ended.
        self._validates = self._should_check_val_epoch() or any(
            config.reduce_on_plateau for config in trainer.strategy.lr_scheduler_configs
        )
        self.hooks = self.automatic_optimization.hooks = HookTable(trainer)
        if hasattr(trainer.precision_plugin, "hooks"):
            trainer.precision_plugin.hooks = self.hooks if passes_through else None
        self.automatic_optimization.loss_divisor = LossDivisor(
            self._weigher(),
            trainer.accumulate_grad_batches,
            # In manual optimization the user decides what a step is; then each wave stands for itself.
            whole_step=(trainer.global_batch_size is not None or (dealer is not None and dealer.whole_step))
            and module.automatic_optimization,
        )
        if trainer.token_weights is not None:
            refuse_impossible(trainer.token_weights, module)
        self.automatic_optimization.token_weights = trainer.token_weights
        self._step_takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._moves_batch = type(trainer.precision_plugin).convert_input is not FabricPrecision.convert_input or any(
            self.hooks.data_overrides(hook)
            for hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        )
        if self._lean:
            data_fetcher._start_profiler = data_fetcher._stop_profiler = lambda: None
            self._next = reader_of(data_fetcher)
        self._go_on_with_random_numbers(data_fetcher, reads_anew)
        self.reading = True

    def _go_on_with_random_numbers(self, data_fetcher: _DataFetcher, reads_anew: bool) -> None:
        """Draw what the saved run would have drawn next: beginning to read a loader draws a number too."""
        state: Any = getattr(self.trainer.strategy, "state", None)  # Lightning's own strategies have none
        if state is None or state.pending is None:
            return
        begun = self.batch_progress.current.ready > 0
        if not begun and not reads_anew and self._only_dealer() is not None:
            iter(data_fetcher)  # begun before the state was restored, or not at all
        if begun or self.was_reading:
            state.restore()  # the loader was begun before the run was saved
        state.pending = None

    def run(self, data_fetcher: _DataFetcher) -> None:
        """Train for one epoch."""
        module = self.trainer.lightning_module
        log_again = RepeatedLog(module, self.trainer, self._results)
        with log_again.installed():
            try:
                super().run(data_fetcher)
            finally:
                if self._leased is not None:
                    self._leased.is_open = False
                self.phases.begin(IDLE)

    def _only_dealer(self) -> Dealer | None:
        loaders = self.trainer.fit_loop._combined_loader.flattened
        return dealer_of(loaders[0]) if len(loaders) == 1 else None

    def _weigher(self) -> Weigher | None:
        """What knows how many samples each data rank has of a micro-batch."""
        loaders = self.trainer.fit_loop._combined_loader.flattened
        return weigher_of(loaders[0]) if len(loaders) == 1 else None

    # ---- leases ---------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the epoch is over."""
        if not self._restarting and not self.trainer.should_stop:
            return self._is_training_done  # what Lightning comes to, asked once a micro-batch
        return bool(super().done)

    @property
    def _is_training_done(self) -> bool:
        # The samples of all workers count against max_steps, not the steps of this one.
        counts = self._leased is None and self.max_steps != -1
        return (counts and self.global_step >= self.max_steps) or bool(self._num_ready_batches_reached())

    def _should_accumulate(self) -> bool:
        accumulates = self.batch_progress.current.ready % self.trainer.accumulate_grad_batches
        return bool(accumulates) and bool(super()._should_accumulate())

    def _settle_leases(self) -> None:
        """After a micro-batch: tell what has been trained on, and read on if others leave something over.

        Where the run is to end, wait for all others, who come here too, and be at the same step as they.
        """
        leased, progress = self._leased, self.batch_progress
        if leased is None or leased.has_ended or self._should_accumulate():
            return
        leased.trained(progress.current.ready)
        self.trainer._signal_connector.tell_lessor(leased)
        while (progress.is_last_batch or leased.heard_of_end) and leased.wait_for_more():
            fetcher = self.trainer.fit_loop._data_fetcher
            iter(fetcher)
            progress.is_last_batch = fetcher.done
        if leased.heard_of_end:
            progress.is_last_batch = not leased.has_ended
        if progress.is_last_batch or leased.has_ended:
            # What happens at the end of an epoch by the number of the step happens on all ranks alike.
            self.set_steps(leased.global_batches)

    def _lease_more(self, leased: LeasedBatchSampler, data_fetcher: _DataFetcher) -> bool:
        """Where the others had taken all chunks before this worker asked: wait for what may come back.

        If nothing does, this is the end of the epoch, with all that belongs to it, as the others come to it.
        """
        while data_fetcher.done and leased.wait_for_more():
            iter(data_fetcher)
        if not data_fetcher.done:
            return True
        self.set_steps(leased.global_batches)
        if leased.has_ended:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            signals = self.trainer._signal_connector
            assert signals.passed(fits=True), "whoever leases has heard of the end"
            signals.end()
        self._batches_that_stepped = max(self._batches_that_stepped, 1)  # loggers count the steps from 0 on
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        self.batch_progress.is_last_batch = self.dropped = True
        self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        return False

    # ---- once a micro-batch ---------------------------------------------------------------------------------------

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Train on one micro-batch.

        Raises:
            StopIteration: if the data or the user (``on_train_batch_start`` returned -1) ended the epoch.
        """
        if self.restarting:
            if self._must_end_first(data_fetcher):
                self._steps = not self._should_accumulate()
                return
            # Lightning would look once more for a validation to end, and count it as one.
            self._restarting = False
        self.phases.begin(DATA)  # before: whoever hears of it finds the loop between two batches
        self._in_batch = True
        self.dropped = False
        if self._leased is not None and data_fetcher.done and not self._lease_more(self._leased, data_fetcher):
            return
        fit_loop = self.trainer.fit_loop
        if fit_loop.skipped and fit_loop.is_skipped:
            self._read_past(data_fetcher)
            return
        if self._lean:
            self._advance(data_fetcher)
        else:
            super().advance(data_fetcher)

    def _advance(self, data_fetcher: _DataFetcher) -> None:
        trainer, hooks, progress = self.trainer, self.hooks, self.batch_progress
        if self.val_loop.restarting:
            self.val_loop.restarting = False  # of all loops in it too, which takes a while
        batch = self._next(data_fetcher)
        self.phases.begin(HOOKS)
        batch_idx = progress.current.ready
        progress.is_last_batch = data_fetcher.done
        batch = self._to_device(batch)
        progress.increment_ready()
        self._steps = not self._should_accumulate()
        connector = trainer._logger_connector
        self._begin_results(connector, batch)
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            outputs: Any = None
        else:
            heard = "on_train_batch_start" in hooks.heard
            response = hooks.call("on_train_batch_start", batch, batch_idx) if heard else None
            trainer.strategy.on_train_batch_start(batch, batch_idx)
            if response == -1:
                self._end_epoch()
                raise StopIteration
            progress.increment_started()
            if self.automatic_optimization.loss_divisor.is_regular(batch_idx):  # type: ignore[union-attr]
                outputs = self._optimize(batch, batch_idx)
            else:
                with self._weighed(batch_idx):
                    outputs = self._optimize(batch, batch_idx)
        self.phases.begin(HOOKS)
        progress.increment_processed()
        if self._leased is not None:
            self._settle_leases()
        if trainer.strategy.lr_scheduler_configs:
            self._step_schedulers()
        if "on_train_batch_end" in hooks.heard:
            hooks.call("on_train_batch_end", outputs, batch, batch_idx)
        self._record(connector)
        progress.increment_completed()
        if self._results:
            connector.update_train_step_metrics()

    def _read_past(self, data_fetcher: _DataFetcher) -> None:
        """Read a micro-batch that is not trained on."""
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

    def _must_end_first(self, data_fetcher: _DataFetcher) -> bool:
        """Resuming: whether the end of a batch or an epoch, or a validation that was begun, comes before a batch."""
        validating = self.val_loop.restarted_mid_evaluation
        if self.owes_end_of_batch:
            self.owes_end_of_batch = False
            self._restarting = self.val_loop.restarting = False
            return True
        if self._num_ready_batches_reached():
            self._skip_next_val = not validating
            return True
        return validating and self._should_check_val_fx(data_fetcher)

    def _weighed(self, batch_idx: int) -> AbstractContextManager[None]:
        if self._is_padding(batch_idx):
            # It only keeps this rank in step with others and weighs nothing, also in what the user logs of it.
            return self._results.padding()
        return self.weighed_logs(batch_idx)

    def weighed_logs(self, batch_idx: int) -> AbstractContextManager[None]:
        """Around the work on a micro-batch: means over ranks of what is logged are those over samples."""
        loss_divisor = self.automatic_optimization.loss_divisor
        weight = 1.0 if loss_divisor is None else loss_divisor.weight(batch_idx)
        return nullcontext() if weight == 1 else self._results.weighed(weight)

    def _is_padding(self, batch_idx: int) -> bool:
        loss_divisor = self.automatic_optimization.loss_divisor
        return loss_divisor is not None and loss_divisor.divisor(batch_idx) == float("inf")

    def _optimize(self, batch: Any, batch_idx: int) -> Any:
        args = (batch, batch_idx) if self._step_takes_index else (batch,)
        trainer = self.trainer
        if trainer.lightning_module.automatic_optimization:
            return self.automatic_optimization.run_lean(trainer.strategy._optimizers[0], batch_idx, args, self._steps)
        # The user calls backward; the strategy weighs the loss of a rank that has fewer samples than others.
        strategy, loss_divisor = trainer.strategy, self.automatic_optimization.loss_divisor
        assert loss_divisor is not None
        strategy.loss_factor = trainer.accumulate_grad_batches / loss_divisor.divisor(batch_idx)
        return self.manual_optimization.run(dict(enumerate(args)))  # type: ignore[arg-type]

    def _end_epoch(self) -> None:
        self.batch_progress.increment_by(0, is_last_batch=True)
        self.batch_progress.increment_processed()
        self._step_schedulers()

    def _step_schedulers(self) -> None:
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _begin_results(self, connector: Any, batch: Any) -> None:
        """The connector's ``on_batch_start``, which asks three times in which stage the Trainer is."""
        connector._first_loop_iter = connector._first_loop_iter is None
        results = self._results
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None

    def _record(self, connector: Any) -> None:
        results = self._results
        if results:  # as the connector's `on_batch_end`, which asks six times in which stage the Trainer is
            found = results.metrics(True)
            connector._progress_bar_metrics.update(found["pbar"])
            connector._callback_metrics.update(found["callback"])
            connector._logged_metrics.update(found["log"])
        results.batch = results.batch_size = None

    def _to_device(self, batch: Any) -> Any:
        trainer = self.trainer
        if not self._moves_batch and is_there(batch, trainer.strategy.root_device):
            return batch
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    # ---- what was logged ------------------------------------------------------------------------------------------

    def collected_logs(self) -> list[Entry]:
        """What this rank has logged of the epoch so far, see :mod:`trainwright.trainer.loop.remembered_logs`."""
        return collected(self._results)

    def log_with_others(self) -> None:
        """Before the end of an epoch, where samples are leased: a worker that got none takes part in the reductions of
        what others have logged. A collective."""
        if self._leased is None:
            return
        mine = collected(self._results, to_save=False)
        of_all = self.trainer.fit_loop.data_ranks.gathered(mine)
        if not mine and not self._logs:
            self.remember_logs(without_weight(next(filter(None, of_all), [])))

    def remember_logs(self, entries: Sequence[Entry]) -> None:
        """Go on with what the saved run had logged of this epoch."""
        self._logs = RememberedLogs(entries)
        self._results.remember(self._logs)

    @contextmanager
    def with_remembered_logs(self) -> Iterator[None]:
        """Around the end of an epoch: what was logged before the run was saved, and not again, is there too."""
        if not self._logs:
            yield
            return
        self._logs.put_back(self._results, self.trainer.lightning_module, self.trainer.strategy.reduce)
        yield
        self._logs.forget(self._results)
        self.remember_logs([])

    # ---- signals --------------------------------------------------------------------------------------------------

    def _broadcast_sigterm_tensor(self) -> None:
        """Lightning's collective at every step; see the module's docstring."""

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Validate if it is time, and stop together if any rank was told to."""
        if self._lean and not self._validates:
            self._end_lean_batch()
        else:
            super().on_advance_end(data_fetcher)
            if self.dropped and not self._should_accumulate():
                self._batches_that_stepped -= 1  # has counted it as a step
            self.phases.begin(HOOKS)
        self._in_batch = False
        signals = self.trainer._signal_connector
        # Not at the end of an epoch, which the fit loop still has to end, nor within an optimizer step.
        if signals.passed(fits=True) and not self._is_training_done and not self._should_accumulate():
            signals.end()

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        due: bool = super()._should_check_val_fx(data_fetcher)
        if due and self._in_batch:
            self.meet()
            self.phases.begin(VALIDATION)
        return due

    def meet(self) -> None:
        """Where all ranks pass: let those that step by themselves come together."""
        peers_of(self.trainer.strategy).meet()

    def _end_lean_batch(self) -> None:
        self._skip_next_val = False
        # Who leases samples learns after a micro-batch alone that it was the last.
        steps = self._steps if self._leased is None else not self._should_accumulate()
        if steps and not self.dropped:
            self._batches_that_stepped += 1
        self._save_loggers_on_train_batch_end()

    def leave_validation(self) -> None:
        """Count as if the validation that runs now had not begun: saved so, a run begins with the whole of it."""
        progress, validated = self.batch_progress, self.val_loop.batch_progress
        if progress.current.completed == progress.current.ready:  # the batch that it came after ends once more
            progress.total.completed -= 1
            progress.current.completed -= 1
        validated.total.increment_by(-validated.current.ready)
        validated.reset_on_run()
        self._in_batch = True

    # ---- the cursor -----------------------------------------------------------------------------------------------

    @property
    def stepped(self) -> int:
        """Micro-batches of the run that stepped, the present one included once it has been optimized."""
        progress: Any = self.batch_progress.current
        uncounted = self._in_batch and progress.processed == progress.ready and not self._should_accumulate()
        return self._batches_that_stepped + (uncounted and not self.dropped)

    def set_steps(self, steps: int) -> None:
        """Set how many optimizer steps the run has made."""
        progress: Any = self.automatic_optimization.optim_progress.optimizer.step.total
        progress.ready = progress.completed = steps

    # ---- going back -----------------------------------------------------------------------------------------------

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """As Lightning's; schedulers of steps stay where they are when no step was made.

        Where samples are leased, they count global batches' worth of samples that all workers have trained on.
        """
        if interval == "step" and not self._lean:
            self._settle_leases()  # Lightning calls this after each batch
        if interval == "step" and self._leased is not None and not update_plateau_schedulers:
            passed = 0 if self._should_accumulate() else self._leased.global_batches_passed()
            for _ in range(passed):
                super().update_lr_schedulers(interval, update_plateau_schedulers)
        elif interval != "step" or not self.dropped:
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def abandon(self) -> None:
        """Forget the epoch that is under way, since an earlier state is to be gone on from."""
        trainer = self.trainer
        trainer.lightning_module.__dict__["_current_fx_name"] = None
        self._results.forget()
        self.val_loop._results.forget()  # type: ignore[attr-defined]
        trainer._logger_connector.reset_results()
        trainer._logger_connector.reset_metrics()
        self.val_loop._has_run = False
        self.dropped = self._in_batch = False
        for optimizer in trainer.strategy.optimizers:
            optimizer.zero_grad()
        trainer.lightning_module.zero_grad()
        forget_scaled(trainer)

    def reset(self) -> None:
        """Begin an epoch, or go on with one."""
        super().reset()
        self._in_batch = False
        self.trainer.fit_loop.begin_epoch()
