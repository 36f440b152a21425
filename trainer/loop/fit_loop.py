"""The fit loop, which resumes its place in the data under any layout.

Lightning counts the micro-batches of one rank, which mean nothing to another layout. Here a :class:`Cursor` is saved,
and counters are set from it on resume: to whole optimizer steps within an epoch, or to the start of the next one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from trainwright.callbacks.guard.verdict import RollBack, notify_rollback
from trainwright.core.lightning_internals import (
    _SUPPORTED_MODES,
    _DataLoaderIterDataFetcher,
    _FitLoop,
    _Loop,
    _set_sampler_epoch,
)
from trainwright.core.problems import ChangedDataError
from trainwright.strategies.contract.attributes import with_attributes
from trainwright.strategies.data.sharding.gathering import shard_after_error
from trainwright.trainer.data.cursor import Cursor, LoaderCursor, Skipped, differences, permission, refusal
from trainwright.trainer.data.reading import describe, leased_batches, position, refuse_cycled_shards, resume_loaders
from trainwright.trainer.loop.counters import cursor_of_counters, measure_limits, reopen, set_all, set_batches
from trainwright.trainer.loop.epoch import LeanEpochLoop
from trainwright.trainer.loop.reloaded import made_in_epoch
from trainwright.trainer.loop.remembered_logs import DataRanks, collect_entries, redistribute, reset_metrics

if TYPE_CHECKING:
    from trainwright.trainer.contract import RunTrainer
    from trainwright.trainer.leases.batches import LeasedBatchSampler


class ResumableFitLoop(_FitLoop):
    """Lightning's fit loop with a cursor of the data.

    Args:
        trainer: the Trainer.
        min_epochs: as Lightning's.
        max_epochs: as Lightning's.

    Attributes:
        skipped: samples that were or will be read but not trained on.
    """

    trainer: RunTrainer
    epoch_loop: LeanEpochLoop

    def __init__(self, trainer: RunTrainer, min_epochs: int | None, max_epochs: int | None) -> None:
        super().__init__(trainer, min_epochs=min_epochs, max_epochs=max_epochs)
        self._loaded: Cursor | None = None
        self._pending = False
        self._started: int | None = None  # epoch
        self._logged: list[dict[str, Any]] = []  # as saved, by data rank
        self._reloaded: float | None = None  # as saved, the epoch at which loaders were last reloaded
        self.skipped: tuple[Skipped, ...] = ()
        self._error: Exception | None = None

    # ---- running --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train, rolling back if a callback asks for it.

        Raises:
            Exception: the one passed to :meth:`end_with`, after training has ended.
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
            except RollBack as verdict:
                self._roll_back(verdict)
        self._restarting = False
        conclude = getattr(self.trainer.strategy, "conclude", None)  # absent on Lightning's own strategies
        if conclude is not None:
            conclude()
        if self.leased is not None:
            self.leased.state()  # no longer available after training
        self.on_run_end()
        if self._error is not None:
            raise self._error

    def _run_epoch(self) -> None:
        try:
            self.on_advance_start()
            self.advance()
            self.on_advance_end()
        except BaseException:
            shard_after_error(self.trainer.lightning_module)
            raise
        finally:
            self.on_iteration_done()

    def rollback_problem(self) -> str | None:
        """Return why samples since an earlier state cannot be read again; ``None`` if they can. Requires loaders."""
        if isinstance(self._data_fetcher, _DataLoaderIterDataFetcher):
            return "training_step reads the data by itself (dataloader_iter)"
        kinds = [entry.kind for entry in self._describe(1)]
        return None if "other" not in kinds else "a training loader cannot save its position (it has no state_dict)"

    def end_with(self, error: Exception) -> None:
        """End training regularly after the present batch, with its final saves, and then raise ``error``.

        Call at the same batch on every rank.
        """
        self._error = error
        self.trainer.should_stop = True

    @property
    def _can_stop_early(self) -> bool:
        # Overrides min_steps and min_epochs.
        return self._error is not None or bool(super()._can_stop_early)

    def _roll_back(self, verdict: RollBack) -> None:
        """Restore an in-memory state like a resumed run, without the hooks of a start."""
        if verdict.skip_steps:
            self.skip_steps(verdict.skip_steps)
        self.trainer.training = True
        self.epoch_loop.abandon()
        if self._data_fetcher is not None:  # drop what was prefetched, by workers too
            self._data_fetcher.teardown()
            vars(self._data_fetcher).get("batches", []).clear()
        known = self.skipped
        self.trainer._checkpoint_connector.roll_back(verdict.held)
        self.skipped = known  # including decisions made since
        self.setup_data()
        self.reset()
        progress: Any = self.epoch_progress.current
        if not self._iteration_based_training():
            progress.completed = progress.processed
        self._resume_within_epoch()
        self.trainer.strategy.state.restore()  # type: ignore[attr-defined]
        self.trainer.copies.rolled_back()
        notify_rollback(self.trainer)

    # ---- leases ---------------------------------------------------------------------------------------------------

    @property
    def leased(self) -> LeasedBatchSampler | None:
        """The lessee of the training loader's samples; ``None``: they are dealt."""
        return None if self._combined_loader is None else leased_batches(self._combined_loader.flattened)

    @property
    def done(self) -> bool:
        """True if training is over. With leased samples ``max_steps`` counts samples of all workers, not the steps of
        this one."""
        if self.leased is None:
            return bool(super().done)
        if self.leased.leases.spent:
            most = self.epoch_loop.max_steps
            rank_zero_info(f"`Trainer.fit` stopped: samples of `max_steps={most!r}` global batches were trained on.")
            return True
        with with_attributes(self.epoch_loop, max_steps=-1):
            return bool(super().done)

    # ---- skipped samples ------------------------------------------------------------------------------------------

    @property
    def is_skipped(self) -> bool:
        """True if the next micro-batch is read but not trained on."""
        step = int(self.epoch_loop.batch_progress.current.ready) // int(self.trainer.accumulate_grad_batches)
        return any(each.epoch == self._epochs_done and each.first <= step < each.last for each in self.skipped)

    def skip_steps(self, count: int) -> None:
        """Skip the step of the last micro-batch read, and following ones, within the epoch."""
        current: Any = self.epoch_loop.batch_progress.current
        first = (int(current.ready) - 1) // int(self.trainer.accumulate_grad_batches)
        last = first + count
        if self.max_batches != float("inf"):
            last = min(last, math.ceil(self.max_batches / self.trainer.accumulate_grad_batches))
        self.skipped += (Skipped(self._epochs_done, first, last),)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def mark_epoch_started(self) -> None:
        """Note that the epoch loop's counters are those of the current epoch."""
        self._started = self._epochs_done

    def cursor(self) -> Cursor | None:
        """Return the place in the data; ``None`` before training. A collective if a loader has a state."""
        if self._started is None or self._combined_loader is None:
            return self._loaded
        if self.leased is not None:
            return self._cursor_of_leases(self.leased)
        progress, accumulation = self.epoch_loop.batch_progress, self.trainer.accumulate_grad_batches
        now: Any = progress.current
        finished = now.processed == now.ready and (progress.is_last_batch or now.ready >= self.max_batches)
        batches = now.processed if finished else now.processed // accumulation * accumulation
        return Cursor(
            epoch=self._started,
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
        """Return the place of all workers together; each must ask, since no rank's own count says it."""
        assert self._started is not None
        accumulation = self.trainer.accumulate_grad_batches
        (found,) = self._describe(accumulation)
        batch = found.global_batch_size or 1
        state = leased.state_to_join(batch) if self.data_ranks.is_apart else leased.state()
        return Cursor(
            epoch=self._started,
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
            states = self.data_ranks.gather(where.pop("state")) if "state" in where else []
            found[index] = replace(found[index], position=where, states=states)
        return found

    def _describe(self, accumulation: int) -> list[LoaderCursor]:
        assert self._combined_loader is not None
        ranks = self.data_ranks.count
        return [describe(loader, ranks, accumulation) for loader in self._combined_loader.flattened]

    @property
    def _epochs_done(self) -> int:
        """Epochs read, which is the index of the current or next one."""
        current: Any = self.epoch_progress.current
        return int(current.processed)

    @property
    def data_ranks(self) -> DataRanks:
        """The data ranks of the run."""
        trainer = self.trainer
        return DataRanks(trainer.strategy, trainer.global_rank, trainer.agreement_group)

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the cursor (in place of Lightning's loader states, which are of rank 0 only) and logged values. A
        collective with several data ranks.
        """
        cursor = self.cursor()
        if cursor is None:
            return {}
        mine = {
            "metrics": {name: value.detach().cpu() for name, value in self.trainer.callback_metrics.items()},
            "collected": collect_entries(self.epoch_loop._results) if self._is_exact(cursor) else [],
        }
        return {
            "cursor": cursor.to_json(),
            "logged": self.data_ranks.gather_logged(mine),
            "reloaded": self._last_train_dl_reload_epoch,
            "validation_reloaded": self.epoch_loop.val_loop.reloaded,  # type: ignore[attr-defined]
            **({} if self.trainer.balance is None else {"balance": self.trainer.balance.state()}),
            # Reading of the next epoch has not started.
            "reading": self.epoch_loop.reading and not cursor.finished,
        }

    def _is_exact(self, cursor: Cursor) -> bool:
        """Return whether no batch read so far will be read again."""
        progress: Any = self.epoch_loop.batch_progress.current
        if self.leased is not None:  # unfinished leases are read again by any worker
            return int(progress.processed) % cursor.accumulation == 0
        return bool(cursor.finished or cursor.steps * cursor.accumulation == progress.processed)

    # ---- loading --------------------------------------------------------------------------------------------------

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Load the cursor; counters are set once this run's loaders are known."""
        saved = state_dict.get("cursor")
        self._loaded = None if saved is None else Cursor.from_json(saved)
        if self._loaded is not None:
            self.skipped = self._loaded.skipped
        self._pending, self._started = True, None
        self._logged, self._reloaded = state_dict.get("logged", []), state_dict.get("reloaded")
        self.epoch_loop.val_loop.reloaded = state_dict.get("validation_reloaded")  # type: ignore[attr-defined]
        if self.trainer.balance is not None:
            self.trainer.balance.load_state(state_dict.get("balance"))
        if saved is None and state_dict.get("combined_loader"):
            rank_zero_warn(
                "The checkpoint holds states of data loaders that Lightning saved, which are those of one rank and "
                "include prefetched batches. They are not used: the epoch continues after the batches counted."
            )
        self.epoch_loop.was_reading = bool(state_dict.get("reading", False))
        if self._loaded is not None and not self._loaded.finished:
            reopen(self.epoch_progress, self._loaded.epoch)

    def setup_data(self) -> None:
        """Set up the loaders: as of their last reload, and at the cursor's position if there is one."""
        reloaded, self._reloaded = self._reloaded, None
        if reloaded not in (None, self._last_train_dl_reload_epoch):
            self._combined_loader = None  # that epoch had other loaders
        if self._combined_loader is None or self._should_reload_train_dl:
            self.trainer.settled_accumulation = None
        with made_in_epoch(reloaded, self._data_source, self.trainer):
            super().setup_data()
        if self._pending and self._combined_loader is not None:
            # The loaders were created before the checkpoint was read, to compute the number of steps.
            self._resume_cursor()
            self.max_batches = self._length()
            assert self._data_fetcher is not None
            iter(self._data_fetcher)
            self._set_val_check()
        if reloaded is not None:
            # Otherwise reload_dataloaders_every_n_epochs would count from here.
            self._last_train_dl_reload_epoch = reloaded

    def _load_combined_loader_states(self) -> None:
        # Called once loaders are known and before they are read, since workers prefetch at once.
        if self.leased is not None:
            assert self._combined_loader is not None
            self._combined_loader.limits = [float("inf")]  # limits apply to all workers together
            # For a run resumed from one without leases, whose optimizer steps were global batches.
            batch = self.trainer.global_batch
            self.leased.trained_before = lambda: 0 if batch is None else self.epoch_loop.global_step * batch.size
        if self._pending:
            self._resume_cursor()
        else:
            self._set_epoch(self._epochs_done)

    def on_advance_start(self) -> None:
        """Start an epoch; its number of batches may differ from the last one."""
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
            # Logged values are saved, so schedulers that monitor them step in a resumed epoch as in any.
            self._restarting = False
        with self.epoch_loop.with_remembered_logs():
            super().on_advance_end()
        signals: Any = self.trainer._signal_connector
        if signals.passed(fits=True, met=True) and not self.done:
            signals.end()

    def _resume_cursor(self) -> None:
        """Resume at the loaded cursor."""
        with self.trainer._checkpoint_connector.restoring():
            self._follow_cursor()

    def _follow_cursor(self) -> None:
        self._pending = False
        loaded = self._loaded
        accumulation = self._accumulation_of(self._epochs_done if loaded is None else loaded.epoch)
        now = self._describe(accumulation)
        cursor = loaded
        if cursor is None:
            count, done = self.data_ranks.count, self._epochs_done
            cursor = cursor_of_counters(self.epoch_loop, done, self._length(), now, accumulation, count)
        if loaded is not None and (found := differences(loaded.loaders, now)):
            if not self.trainer.allow_changed_data:
                raise ChangedDataError(refusal(found))
            rank_zero_warn(permission(found))
        self._restore_metrics()
        counters: Any = self.epoch_loop.batch_progress.current
        # Saved before the end of an epoch was complete: the rest is pending, and may need logged values.
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
        collected = redistribute([each["collected"] for each in self._logged], ranks.rank, ranks.count)
        if not next_epoch:
            self.epoch_loop.remember_logs(collected)
            return
        reset_metrics(collected, self.trainer.lightning_module)
        self._go_to_next_epoch(cursor)

    def _go_to_next_epoch(self, cursor: Cursor) -> None:
        if self._logged and self.epoch_progress.current.completed == cursor.epoch:
            # Saved in on_train_epoch_end, before these would have stepped.
            self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        for tracker in (self.epoch_progress.current, self.epoch_progress.total):
            set_all(tracker, max(tracker.ready, cursor.epoch + 1))
        set_all(self.epoch_progress.current, cursor.epoch + 1)
        _Loop.restarting.fset(self, False)  # type: ignore[attr-defined]

    def _restore_metrics(self) -> None:
        """Restore the latest logged values, for schedulers and callbacks that read them."""
        if not self._logged:
            return
        ranks = self.data_ranks
        own = self._logged[ranks.rank if len(self._logged) == ranks.count else 0]["metrics"]
        device = self.trainer.strategy.root_device
        self.trainer._logger_connector._callback_metrics.update(move_data_to_device(own, device))

    def _was_saved_in_a_batch(self, cursor: Cursor) -> bool:
        """Return whether the run was saved in ``on_train_batch_end``, before validation and plateau schedulers."""
        counters: Any = self.epoch_loop.batch_progress.current
        within = counters.processed == counters.ready == counters.completed + 1
        return within and bool(self._logged) and self._is_exact(cursor)

    def _accumulation_of(self, epoch: int) -> int:
        """Return the micro-batches per optimizer step in an epoch, by the schedule if there is one."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientAccumulationScheduler):
                return int(callback.get_accumulate_grad_batches(epoch))
        return int(self.trainer.accumulate_grad_batches)

    def on_run_start(self) -> None:
        """Start training; within an epoch, with the accumulation of that epoch."""
        super().on_run_start()
        self._resume_within_epoch()

    def _resume_within_epoch(self) -> None:
        if not self.restarted_mid_epoch:
            return
        self.trainer.accumulate_grad_batches = self._accumulation_of(self._epochs_done)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StochasticWeightAveraging) and self._epochs_done <= callback.swa_end:
                # Replaces the scheduler, as the start of the epoch did.
                callback.on_train_epoch_start(self.trainer, self.trainer.lightning_module)

    # ---- lengths --------------------------------------------------------------------------------------------------

    def _set_epoch(self, epoch: int) -> None:
        assert self._combined_loader is not None
        for loader in self._combined_loader.flattened:
            _set_sampler_epoch(loader, epoch)

    def _set_limits(self) -> bool:
        refuse_cycled_shards(self._combined_loader)
        return measure_limits(self._combined_loader, self.trainer.limit_train_batches)

    def _length(self) -> int | float:
        """Return the batches of the present epoch on each data rank."""
        combined: Any = self._combined_loader
        length: int | float = _SUPPORTED_MODES[combined._mode]["fn"](combined.limits)
        return length

    def _set_val_check(self) -> None:
        trainer = self.trainer
        by_time = getattr(trainer, "_val_check_time_interval", None) is not None
        if by_time or isinstance(trainer.val_check_interval, int) or self.max_batches == float("inf"):
            return
        trainer.val_check_batch = max(1, int(self.max_batches * trainer.val_check_interval))
