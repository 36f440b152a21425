"""The outer loop of training, which knows where it stands in its data and goes on from there under another layout.

Lightning counts the micro-batches of one rank, which mean nothing to another layout. Here a :class:`Cursor` is saved,
and the counters are set from it when a run is resumed: to whole optimizer steps in the middle of an epoch, and to the
beginning of the next epoch at the end of one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from trainwright.callbacks.guard.verdict import GoBack, tell_gone_back
from trainwright.checkpoint.memory.snapshots import Snapshot
from trainwright.core.lightning_internals import (
    _DataLoaderIterDataFetcher,
    _FitLoop,
    _Loop,
    _set_sampler_epoch,
)
from trainwright.core.problems import ChangedDataError
from trainwright.trainer.data.cursor import Cursor, LoaderCursor, Skipped, differences, permission, refusal
from trainwright.trainer.data.reading import describe, leased_batches, position, refuse_cycled_shards, resume_loaders
from trainwright.trainer.loop.counters import (
    accumulation_of,
    cursor_of_counters,
    length_of,
    measure_limits,
    reopen,
    set_all,
    set_batches,
)
from trainwright.trainer.loop.data_ranks import DataRanks
from trainwright.trainer.loop.epoch import LeanEpochLoop
from trainwright.trainer.loop.remembered_logs import reset_metrics, shared_out

if TYPE_CHECKING:
    from trainwright.trainer.contract import RunTrainer
    from trainwright.trainer.leases.batches import LeasedBatchSampler


class ResumableFitLoop(_FitLoop):
    """Lightning's fit loop with a cursor of the data.

    Args:
        trainer: the Trainer.
        min_epochs: as Lightning's.
        max_epochs: as Lightning's.
    """

    trainer: RunTrainer
    epoch_loop: LeanEpochLoop

    def __init__(self, trainer: RunTrainer, min_epochs: int | None, max_epochs: int | None) -> None:
        super().__init__(trainer, min_epochs=min_epochs, max_epochs=max_epochs)
        self._loaded: Cursor | None = None
        self._pending = False
        self._begun: int | None = None
        self._logged: list[dict[str, Any]] = []  # as saved, of each data rank
        self._reloaded: float | None = None  # as saved, the epoch for which loaders were last made anew
        self.skipped: tuple[Skipped, ...] = ()
        """Samples that were or will be read but not trained on."""
        self._error: Exception | None = None

    # ---- running --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train, going back where a callback wants it.

        Raises:
            Exception: what :meth:`end_with` was given, when training has ended.
        """
        self._error = None
        self.setup_data()
        if self.skip:
            return
        self.reset()
        self.on_run_start()
        while not self.done:
            try:
                self._run_epoch()
            except StopIteration:
                break
            except GoBack as verdict:
                self._go_back(verdict)
        self._restarting = False
        conclude = getattr(self.trainer.strategy, "conclude", None)  # Lightning's own strategies have none
        if conclude is not None:
            conclude()
        if self.leased is not None:
            self.leased.state()  # nobody can be asked any more once training has ended
        self.on_run_end()
        if self._error is not None:
            raise self._error

    def _run_epoch(self) -> None:
        try:
            self.on_advance_start()
            self.advance()
            self.on_advance_end()
        finally:
            self.on_iteration_done()

    def why_not_back(self) -> str | None:
        """Why the samples since an earlier state could not be read again; ``None``: they can.

        To be asked once the loaders are known.
        """
        if isinstance(self._data_fetcher, _DataLoaderIterDataFetcher):
            return "training_step reads the data by itself (dataloader_iter)"
        kinds = [entry.kind for entry in self._describe(1)]
        return None if "other" not in kinds else "a training loader cannot tell where it stands (it has no state_dict)"

    def end_with(self, error: Exception) -> None:
        """Let training end after the present batch as at its regular end, and raise ``error`` then.

        To be called at the same batch on every rank. What is saved when training ends is saved.
        """
        self._error = error
        self.trainer.should_stop = True

    @property
    def _can_stop_early(self) -> bool:
        # Whatever the fewest steps or epochs are that were asked for.
        return self._error is not None or bool(super()._can_stop_early)

    def _go_back(self, verdict: GoBack) -> None:
        """Go on from a state in memory: what resuming does, but for hooks that tell of a beginning."""
        if verdict.skip_steps:
            self._skip_steps(verdict.skip_steps)
        self.trainer.training = True
        self.epoch_loop.abandon()
        self._leave_data()
        self._put_back(verdict.held)
        self.setup_data()
        self.reset()
        progress: Any = self.epoch_progress.current
        if not self._iteration_based_training():
            progress.completed = progress.processed
        self._go_on_within_epoch()
        self.trainer.strategy.state.restore()  # type: ignore[attr-defined]
        self.trainer.copies.gone_back()
        tell_gone_back(self.trainer)

    def _leave_data(self) -> None:
        """Forget what was read ahead, by workers too."""
        if self._data_fetcher is not None:
            self._data_fetcher.teardown()
            vars(self._data_fetcher).get("batches", []).clear()

    def _put_back(self, held: Snapshot) -> None:
        known, reloaded = self.skipped, self._last_train_dl_reload_epoch
        self.trainer._checkpoint_connector.go_back(held)
        self.skipped = known  # also what was decided since the state was taken
        if self._reloaded not in (None, reloaded):
            self._combined_loader = None  # the loaders of that epoch were other ones

    # ---- leases ---------------------------------------------------------------------------------------------------

    @property
    def leased(self) -> LeasedBatchSampler | None:
        """What leases the samples of the training loader; ``None``: they are dealt."""
        return None if self._combined_loader is None else leased_batches(self._combined_loader.flattened)

    @property
    def done(self) -> bool:
        """Whether training is over. Where samples are leased, the samples of all workers count against ``max_steps``,
        not the steps of this one."""
        if self.leased is None:
            return bool(super().done)
        most = self.epoch_loop.max_steps
        if self.leased.leases.spent:
            rank_zero_info(f"`Trainer.fit` stopped: samples of `max_steps={most!r}` global batches were trained on.")
            return True
        self.epoch_loop.max_steps = -1
        try:
            return bool(super().done)
        finally:
            self.epoch_loop.max_steps = most

    # ---- what is not trained on -----------------------------------------------------------------------------------

    @property
    def is_skipped(self) -> bool:
        """Whether the next micro-batch is read but not trained on."""
        return any(
            each.epoch == self._epochs_done and each.first <= self._next_step < each.last for each in self.skipped
        )

    @property
    def _next_step(self) -> int:
        """Index in the epoch of the optimizer step that the next micro-batch belongs to."""
        current: Any = self.epoch_loop.batch_progress.current
        return int(current.ready) // int(self.trainer.accumulate_grad_batches)

    def _skip_steps(self, count: int) -> None:
        """Not to train on the step whose last micro-batch was read just now, and those after it in the epoch."""
        current: Any = self.epoch_loop.batch_progress.current
        first = (int(current.ready) - 1) // int(self.trainer.accumulate_grad_batches)
        last = first + count
        if self.max_batches != float("inf"):
            last = min(last, math.ceil(self.max_batches / self.trainer.accumulate_grad_batches))
        self.skipped += (Skipped(self._epochs_done, first, last),)

    def record_dropped(self) -> None:
        """The step of the present micro-batch is not made."""
        self._skip_steps(1)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """The epoch loop tells that its counters are now those of the current epoch."""
        self._begun = self._epochs_done

    def cursor(self) -> Cursor | None:
        """Where the run stands in its data; ``None`` before any training. A collective if a loader keeps a state."""
        if self._begun is None or self._combined_loader is None:
            return self._loaded
        if self.leased is not None:
            return self._cursor_of_leases(self.leased)
        progress, accumulation = self.epoch_loop.batch_progress, self.trainer.accumulate_grad_batches
        now: Any = progress.current
        finished = now.processed == now.ready and (progress.is_last_batch or now.ready >= self.max_batches)
        batches = now.processed if finished else now.processed // accumulation * accumulation
        return Cursor(
            epoch=self._begun,
            steps=math.ceil(batches / accumulation),
            finished=finished,
            stepped=self.epoch_loop.stepped,
            accumulation=accumulation,
            batches=None if self.max_batches == float("inf") else int(self.max_batches),
            data_ranks=self.data_ranks.count,
            loaders=tuple(self._loader_cursors(batches, finished)),
            skipped=self.skipped,
        )

    def _cursor_of_leases(self, leased: LeasedBatchSampler) -> Cursor:
        """Where all workers together stand; each has to ask. No rank's own count of batches says that."""
        assert self._begun is not None
        accumulation = self.trainer.accumulate_grad_batches
        (found,) = self._describe(accumulation)
        batch = found.global_batch_size or 1
        state = leased.state_to_join(batch) if self.data_ranks.is_apart else leased.state()
        return Cursor(
            epoch=self._begun,
            steps=state["samples"] // batch,
            finished=state.pop("complete"),
            stepped=state["trained"] // batch,
            accumulation=accumulation,
            batches=None,
            data_ranks=self.data_ranks.count,
            loaders=(replace(found, position={**state, "passes": 0}),),
            skipped=self.skipped,
        )

    def _loader_cursors(self, batches: int, finished: bool) -> list[LoaderCursor]:
        found = self._describe(self.trainer.accumulate_grad_batches)
        assert self._combined_loader is not None
        cycles = self._combined_loader._mode == "max_size_cycle"
        for index, loader in enumerate(self._combined_loader.flattened):
            where = position(loader, batches, finished, cycles)
            states = self.data_ranks.gathered(where.pop("state")) if "state" in where else []
            found[index] = replace(found[index], position=where, states=states)
        return found

    def _describe(self, accumulation: int) -> list[LoaderCursor]:
        assert self._combined_loader is not None
        ranks = self.data_ranks.count
        return [describe(loader, ranks, accumulation) for loader in self._combined_loader.flattened]

    @property
    def _epochs_done(self) -> int:
        """Epochs that have been read, which is the number of the one that is read now or next."""
        current: Any = self.epoch_progress.current
        return int(current.processed)

    @property
    def data_ranks(self) -> DataRanks:
        """The data ranks of the run."""
        trainer = self.trainer
        return DataRanks(trainer.strategy, trainer.global_rank, trainer.agreement_group)

    def on_save_checkpoint(self) -> dict[str, Any]:
        """The cursor, in place of the states of loaders, which Lightning has of rank 0 alone; and what was logged.

        A collective where data ranks are several.
        """
        cursor = self.cursor()
        if cursor is None:
            return {}
        mine = {
            "metrics": {name: value.detach().cpu() for name, value in self.trainer.callback_metrics.items()},
            "collected": self.epoch_loop.collected_logs() if self._is_exact(cursor) else [],
        }
        return {
            "cursor": cursor.to_json(),
            "logged": self.data_ranks.logged(mine),
            "reloaded": self._last_train_dl_reload_epoch,
            **({} if self.trainer.balance is None else {"balance": self.trainer.balance.state()}),
            # Of the epoch that comes next nothing has been begun.
            "reading": self.epoch_loop.reading and not cursor.finished,
        }

    def _is_exact(self, cursor: Cursor) -> bool:
        """Whether no batch that was read will be read again."""
        progress: Any = self.epoch_loop.batch_progress.current
        if self.leased is not None:  # what is leased and not done is read again, whoever had read it
            return int(progress.processed) % cursor.accumulation == 0
        return bool(cursor.finished or cursor.steps * cursor.accumulation == progress.processed)

    # ---- loading --------------------------------------------------------------------------------------------------

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Take the cursor; the counters are set once this run's loaders are known."""
        saved = state_dict.get("cursor")
        self._loaded = None if saved is None else Cursor.from_json(saved)
        if self._loaded is not None:
            self.skipped = self._loaded.skipped
        self._pending, self._begun = True, None
        self._logged, self._reloaded = state_dict.get("logged", []), state_dict.get("reloaded")
        if self.trainer.balance is not None:
            self.trainer.balance.go_on_with(state_dict.get("balance"))
        if saved is None and state_dict.get("combined_loader"):
            rank_zero_warn(
                "The checkpoint holds states of data loaders that Lightning saved, which are those of one rank and "
                "begin where a loader had read ahead. They are not used: the epoch goes on after the batches counted."
            )
        self.epoch_loop.was_reading = bool(state_dict.get("reading", False))
        if self._loaded is not None and not self._loaded.finished:
            reopen(self.epoch_progress, self._loaded.epoch)

    def setup_data(self) -> None:
        """Set up the loaders, where the cursor says if there is one."""
        if self._combined_loader is None or self._should_reload_train_dl:
            self.trainer.settled_accumulation = None
        super().setup_data()
        if self._pending and self._combined_loader is not None:
            # The loaders were there before the checkpoint was read, since somebody asked for the number of steps.
            self._take_up()
            self.max_batches = self._length()
            assert self._data_fetcher is not None
            iter(self._data_fetcher)
            self._set_val_check()
        if self._reloaded is not None:
            # Else reload_dataloaders_every_n_epochs would count from here.
            self._last_train_dl_reload_epoch, self._reloaded = self._reloaded, None

    def _load_combined_loader_states(self) -> None:
        # Called once the loaders are known and before they are read: workers read ahead at once.
        if self.leased is not None:
            self._lift_limits(self.leased)
        if self._pending:
            self._take_up()
        else:
            self._set_epoch(self._epochs_done)

    def on_advance_start(self) -> None:
        """Begin an epoch; its number of batches may be another than that of the one before."""
        self.epoch_loop.reading = False
        self.setup_data()
        self._set_epoch(self._epochs_done)
        if self._set_limits():
            self.max_batches = self._length()
            self._set_val_check()
        super().on_advance_start()

    def on_advance_end(self) -> None:
        """End an epoch."""
        self.epoch_loop.meet()
        self.epoch_loop.log_with_others()
        if self._logged:
            # What was logged is saved with the run, so schedulers that wait for it step in a resumed epoch as in any.
            self._restarting = False
        with self.epoch_loop.with_remembered_logs():
            super().on_advance_end()
        signals: Any = self.trainer._signal_connector
        if signals.passed(fits=True, met=True) and not self.done:
            signals.end()

    def _take_up(self) -> None:
        """Resume where the loaded cursor stands."""
        with self.trainer._checkpoint_connector.restoring():
            self._follow_cursor()

    def _follow_cursor(self) -> None:
        self._pending = False
        loaded = self._loaded
        accumulation = self._accumulation_of(self._epochs_done if loaded is None else loaded.epoch)
        now = self._describe(accumulation)
        cursor = self._cursor_of_counters(now, accumulation) if loaded is None else loaded
        if loaded is not None and (found := differences(loaded.loaders, now)):
            if not self.trainer.allow_changed_data:
                raise ChangedDataError(refusal(found))
            rank_zero_warn(permission(found))
        self._restore_metrics()
        counters: Any = self.epoch_loop.batch_progress.current
        # Saved before the end of an epoch was over: what comes then is still to be done. It may need what was logged.
        in_place = cursor.finished and self._epochs_done == cursor.epoch
        in_place = in_place and (bool(self._logged) or counters.completed == counters.ready)
        next_epoch = cursor.finished and not in_place
        owes = not next_epoch and self._was_saved_in_a_batch(cursor)
        assert self._combined_loader is not None
        ranks, leased = self.data_ranks, self.leased is not None
        resume_loaders(
            self._combined_loader.flattened, cursor, now, accumulation, ranks.rank, ranks.count, in_place, leased
        )
        self._set_epoch(cursor.epoch + next_epoch)
        self._set_limits()
        set_batches(self.epoch_loop, cursor, self._length(), in_place, owes, accumulation)
        collected = shared_out([each["collected"] for each in self._logged], ranks.rank, ranks.count)
        if not next_epoch:
            self.epoch_loop.remember_logs(collected)
            return
        reset_metrics(collected, self.trainer.lightning_module)
        self._go_to_next_epoch(cursor)

    def _go_to_next_epoch(self, cursor: Cursor) -> None:
        if self._logged and self.epoch_progress.current.completed == cursor.epoch:
            # Saved in on_train_epoch_end, after which these would have stepped.
            self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        for tracker in (self.epoch_progress.current, self.epoch_progress.total):
            set_all(tracker, max(tracker.ready, cursor.epoch + 1))
        set_all(self.epoch_progress.current, cursor.epoch + 1)
        _Loop.restarting.fset(self, False)  # type: ignore[attr-defined]

    def _restore_metrics(self) -> None:
        """What was logged last, for schedulers and callbacks that look at it before it is logged again."""
        if not self._logged:
            return
        ranks = self.data_ranks
        own = self._logged[ranks.rank if len(self._logged) == ranks.count else 0]["metrics"]
        device = self.trainer.strategy.root_device
        self.trainer._logger_connector._callback_metrics.update(move_data_to_device(own, device))

    def _was_saved_in_a_batch(self, cursor: Cursor) -> bool:
        """Whether the run was saved in ``on_train_batch_end``; a validation and schedulers on a plateau come after."""
        counters: Any = self.epoch_loop.batch_progress.current
        within = counters.processed == counters.ready == counters.completed + 1
        return within and bool(self._logged) and self._is_exact(cursor)

    def _cursor_of_counters(self, now: list[LoaderCursor], accumulation: int) -> Cursor:
        ranks = self.data_ranks.count
        return cursor_of_counters(self.epoch_loop, self._epochs_done, self._length(), now, accumulation, ranks)

    def _accumulation_of(self, epoch: int) -> int:
        return accumulation_of(self.trainer.callbacks, epoch, self.trainer.accumulate_grad_batches)  # type: ignore[attr-defined]

    def on_run_start(self) -> None:
        """Begin training; in the middle of an epoch with the accumulation that its beginning would have set."""
        super().on_run_start()
        self._go_on_within_epoch()

    def _go_on_within_epoch(self) -> None:
        if self.restarted_mid_epoch:
            self.trainer.accumulate_grad_batches = self._accumulation_of(self._epochs_done)
            self._go_on_with_averaging()

    def _go_on_with_averaging(self) -> None:
        """Exchange the scheduler as the beginning of the epoch did, which is not called again."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StochasticWeightAveraging) and self._epochs_done <= callback.swa_end:
                callback.on_train_epoch_start(self.trainer, self.trainer.lightning_module)

    # ---- lengths --------------------------------------------------------------------------------------------------

    def _set_epoch(self, epoch: int) -> None:
        assert self._combined_loader is not None
        for loader in self._combined_loader.flattened:
            _set_sampler_epoch(loader, epoch)

    def _set_limits(self) -> bool:
        refuse_cycled_shards(self._combined_loader)
        return measure_limits(self._combined_loader, self.trainer.limit_train_batches)

    def _lift_limits(self, leased: LeasedBatchSampler) -> None:
        """What limits an epoch, limits all workers together; each goes on as long as it gets leases."""
        assert self._combined_loader is not None
        self._combined_loader.limits = [float("inf")]
        # Of a run that did not lease: its optimizer steps were global batches.
        batch = self.trainer.global_batch
        leased.trained_before = lambda: 0 if batch is None else self.epoch_loop.global_step * batch.size

    def _length(self) -> int | float:
        return length_of(self._combined_loader)

    def _set_val_check(self) -> None:
        trainer = self.trainer
        by_time = getattr(trainer, "_val_check_time_interval", None) is not None
        if by_time or isinstance(trainer.val_check_interval, int) or self.max_batches == float("inf"):
            return
        trainer.val_check_batch = max(1, int(self.max_batches * trainer.val_check_interval))
