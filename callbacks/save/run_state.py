"""The callback that saves the run state during training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from trainwright.callbacks.save.best import SaveRecord, SaveRecords
from trainwright.callbacks.save.logged import (
    fresh_metrics,
    is_dev_run,
    logged_metrics,
    refuse_unlogged,
    warn_of_later_checkpoints,
)
from trainwright.callbacks.save.options import SaveName, SaveOptions
from trainwright.callbacks.save.schedule import SaveSchedule
from trainwright.callbacks.steps import are_synchronous, require_strategy
from trainwright.checkpoint.exchange.distinct import broadcast_value
from trainwright.checkpoint.exchange.groups import gloo_group
from trainwright.checkpoint.format.manifest import Manifest
from trainwright.checkpoint.memory.replicas import NeighbourCopies
from trainwright.checkpoint.memory.snapshots import Snapshot
from trainwright.checkpoint.read.find import FoundCheckpoint
from trainwright.checkpoint.store.paths import join_path
from trainwright.checkpoint.store.storage import clean_up
from trainwright.checkpoint.store.write_errors import refuse_unwritable
from trainwright.checkpoint.write.asynchronous import AsyncSaver, BlockingSaver, Saved
from trainwright.checkpoint.write.retention import Retention, may_delete
from trainwright.checkpoint.write.retention import apply as apply_retention
from trainwright.checkpoint.write.save import Content
from trainwright.core.config.options import refuse
from trainwright.core.errors import CheckpointError, ClearingError
from trainwright.core.run.phases import SAVING, Phases
from trainwright.core.run.traits import traits_of

# Seconds that a failing run waits for the checkpoint being written.
_PATIENCE = 120.0
# In the manifest: checkpoints that a user saved by other means into the same folder are never deleted.
_MARK = "RunStateCheckpoint"
# For ranks that hang (dead ones are noticed at once); writing to a slow store may take long.
_TIMEOUT = timedelta(hours=2)


@dataclass(eq=False, repr=False)
class RunStateCheckpoint(SaveOptions, Checkpoint):
    """Saves the whole run state into folders that any layout can read.

    Saves happen after an optimizer step, after validation if a value is monitored, and at the end of training. All
    ranks decide alike: by steps, or by the clock of rank 0 at steps agreed on. With asynchronous steps
    (``strategy.traits.steps_are_collective`` is false) they synchronize for a save by steps, and one by the clock
    happens at the end of the epoch.

    ``trainwright.Trainer`` finds the newest by ``ckpt_path="last"``. Lightning's own Trainer looks only for files of
    its ``ModelCheckpoint``: pass it :attr:`last_model_path`. ``"best"`` works with both.

    Args:
        dirpath: folder for the checkpoints, local or any fsspec path; ``None``: ``checkpoints`` in the Trainer's
            ``default_root_dir``. One callback per folder.
        filename: name of a checkpoint's folder, a template for ``str.format`` with ``step``, ``epoch`` and logged
            metrics, such as ``"{epoch}-{step:06d}-{val_loss:.3f}"``. An existing one of that name is replaced.
        every: ``"auto"``: unless one of the three intervals below is given, the interval that minimizes lost time, by
            Young's and Daly's formula from the measured cost of a save and ``mtbf``; the first save after a minute,
            later ones between 10 seconds and an hour apart. ``None``: off.
        every_n_steps: optimizer steps between saves; ``None``: off.
        every_n_seconds: seconds between saves; ``None``: off.
        every_n_epochs: epochs between saves; ``None``: off.
        save_at_end: save when training ends, unless nothing was trained since the last save.
        save_weights_only: leave out optimizers, schedulers and callbacks; such a checkpoint cannot be resumed.
        asynchronous: write in the background from a copy, which takes host memory of the size of what this rank writes.
            A write error is raised at one of the next steps.
        keep_last: number of newest checkpoints kept.
        keep_every: keep those of every n-th step for good; ``None``: off.
        keep_best: number of best ones kept, by ``monitor``; 0: off.
        monitor: name of a logged value; after each validation (or epoch) a state among the best is saved.
        mode: ``"min"`` or ``"max"``, which values are best.
        mtbf: mean hours between failures of the whole job, for ``every="auto"``.
        in_memory_every_n_steps: optimizer steps between copies in the memory of this rank and of a rank on the next
            node, see :class:`~trainwright.checkpoint.memory.replicas.NeighbourCopies`; ``None``: off.
        on_error: ``"raise"``, or ``"warn"`` and continue training, when a save fails.

    Attributes:
        copies: in-memory copies, if requested; created when training starts.

    Raises:
        ValueError: naming all invalid arguments.
    """

    # The strategy may still be receiving the weights of this step.
    looks_at_parameters = False

    def __post_init__(self) -> None:
        refuse(self.option_problems(), "RunStateCheckpoint")
        self.copies: NeighbourCopies | None = None
        self.retention = Retention(self.keep_last, self.keep_every, self.keep_best, self.monitor, self.mode)
        self._name = SaveName(self.filename)
        self._schedule = SaveSchedule(
            self.every, self.every_n_steps, self.every_n_seconds, self.every_n_epochs, self.mtbf
        )
        self._records = SaveRecords(self.keep_best, self.mode)
        self._pending: SaveRecord | None = None  # not yet published
        self._saver: BlockingSaver | None = None
        self._folder = ""
        self._step = 0  # last seen
        self._saved_step = -1  # of the last save
        self._settle_at = 0  # step at which the ranks check whether the pending save has ended
        self._measured: tuple[int, float] | None = None  # step and value of the monitored value
        self._validated = False  # in this fit
        self._fits = False
        self._prepared = False
        self._blocked = 0.0  # seconds that the last save blocked training

    # ---- public attributes ------------------------------------------------------------------------------------------

    @property
    def best_model_path(self) -> str:
        """The checkpoint with the best monitored value (the newest if none is monitored); ``""``: none."""
        best = self._records.best
        return "" if best is None else best.path

    @property
    def best_model_score(self) -> Tensor | None:
        """The best monitored value."""
        best = self._records.best
        return None if best is None or best.score is None else torch.tensor(best.score)

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint; ``""``: none."""
        last = self._records.last
        return "" if last is None else last.path

    @property
    def interval_seconds(self) -> float | None:
        """Current seconds between saves; ``None`` if saves do not depend on the clock."""
        return self._schedule.interval_seconds

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint."""
        return self._generate_state_key(monitor=self.monitor, mode=self.mode, filename=self._name.template)

    def state_dict(self) -> dict[str, Any]:
        """Return the newest and best checkpoints, including the pending one."""
        return {"folder": self._folder, "records": self._records.including(self._pending).state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the records, if this run saves into the same folder."""
        if not self._fits:
            return  # testing a checkpoint must not drop what this run has saved since
        if state_dict["folder"] == self._folder:
            self._records.load_state_dict(state_dict["records"])
        elif self.monitor is not None:
            rank_zero_warn(
                f"This run saves into {self._folder}, the one it resumes saved into {state_dict['folder']}: the best "
                "checkpoints there are not compared with those of this run."
            )

    def take_over(self, state_dict: dict[str, Any]) -> None:
        """Take the records of the ranks that a notebook has started for a fit."""
        self._folder = state_dict["folder"]
        self._records.load_state_dict(state_dict["records"])

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Agree on the folder, and remove unfinished checkpoints in it."""
        self._fits = stage == TrainerFn.FITTING
        if not self._fits:
            return
        require_strategy(self, trainer, "run_state")
        if not trainer.strategy.writes_run_states:  # type: ignore[attr-defined]
            raise ValueError(
                "RunStateCheckpoint writes its own folders and would bypass the CheckpointIO plugin of the Trainer. "
                "Remove the plugin, or save with lightning.pytorch.callbacks.ModelCheckpoint."
            )
        if traits_of(trainer.strategy).leases_samples is not None and self.every_n_steps is not None:
            raise ValueError(
                f"RunStateCheckpoint(every_n_steps={self.every_n_steps}) with workers that lease their samples and "
                "make unequal numbers of steps. Save by every_n_epochs=1 or seconds, or set strategy.leases=none."
            )
        folder = self.dirpath or join_path(str(trainer.default_root_dir), "checkpoints")
        self._folder = trainer.strategy.broadcast(folder)
        self._refuse_shared_folder(trainer)
        problem = None
        if trainer.is_global_zero:
            try:
                refuse_unwritable(self._folder)
                clean_up(self._folder)
            except CheckpointError as error:  # must reach the other ranks, which wait for the broadcast
                problem = str(error)
        problem = trainer.strategy.broadcast(problem)
        if problem is not None:
            raise CheckpointError(problem)

    def _refuse_shared_folder(self, trainer: Trainer) -> None:
        others = [c for c in trainer.callbacks if isinstance(c, RunStateCheckpoint) and c is not self]  # type: ignore[attr-defined]
        if any(other._folder == self._folder for other in others):
            raise ValueError(
                f"Two RunStateCheckpoint callbacks save into {self._folder}, and each would delete the other's. Give "
                "each its own dirpath, or use one for everything."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting steps and seconds."""
        self._step = trainer.global_step
        self._saved_step = -1
        self._pending = self._measured = None
        self._validated = False
        self._prepared = not self.asynchronous
        if self.asynchronous:
            self._saver = AsyncSaver(partial(_new_group, trainer))
        else:
            self._agreement(trainer)  # created before anything can fail
            self._saver = BlockingSaver(partial(self._agreement, trainer))
        # A run resumed from memory produces the very states of the later ones again.
        if trainer.is_global_zero and not isinstance(trainer.ckpt_path, Snapshot):
            warn_of_later_checkpoints(self._folder, self._step)
        self._schedule.start(self._step, partial(self._from_rank_zero, trainer))
        if self.in_memory_every_n_steps is not None and self.copies is None:
            self.copies = NeighbourCopies(partial(_new_group, trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save if due after an optimizer step, and take the result of the last save."""
        step = trainer.global_step
        if step == self._step or is_dev_run(trainer):
            return
        before, self._step = self._step, step
        if not are_synchronous(trainer):
            # Ranks reach a step at different times: only a save due by its number synchronizes them.
            if self._schedule.is_due_by_number(step):
                self._save(trainer)
            return
        if not self._prepared:
            self._prepare(trainer)
        self._settle_if_done(trainer)
        if self._schedule.is_due_after_step(step):
            self._save(trainer)
        every = self.in_memory_every_n_steps
        if every is not None and step // every > before // every:
            self._copy(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a state among the best."""
        if not trainer.sanity_checking and trainer.state.fn == TrainerFn.FITTING:
            self._validated = True
            self._save_if_best(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after every n-th epoch, and a state among the best by a value logged in training."""
        if self.monitor is not None and (self._validated or not trainer.enable_validation):
            refuse_unlogged(self.monitor, trainer)
        self._save_if_best(trainer)
        # Asynchronous ranks differ in their step counts and clocks.
        is_overdue = not are_synchronous(trainer) and self._from_rank_zero(
            trainer, self._schedule.is_overdue(trainer.global_step)
        )
        if is_overdue or self._schedule.is_due_after_epoch(trainer.current_epoch):
            self._save_once(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a last time, and wait until all is written."""
        if self.save_at_end:
            self._save_once(trainer)
        self._settle(trainer)
        if self.copies is not None:
            with self._errors_as_configured():
                self.copies.wait()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Wait a bounded time for the pending checkpoint."""
        if self._saver is None:
            return
        path = self._saver.in_flight
        if path is not None:
            rank_zero_info(f"Waiting up to {_PATIENCE:.0f} s for the pending checkpoint {path}.")
        if not self._saver.wait(_PATIENCE):
            rank_zero_warn(
                f"The checkpoint {path} was not finished within {_PATIENCE:.0f} s and is abandoned; its unfinished "
                "folder is removed when the next run saves into the same place."
            )
            return
        saved = self._saver.take()
        if saved is not None:
            self._record(saved)
            if saved.error is not None:
                rank_zero_warn(f"Besides the error that ends this run, a checkpoint was not written: {saved.error}")
        self._saver.release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release memory and the process group."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset steps; what was saved since remains valid, but later steps are repeated, maybe with other samples."""
        self._step = trainer.global_step
        self._settle_at = min(self._settle_at, self._step + 1)
        if self._saved_step > self._step:
            self._saved_step = -1
            self._schedule.restart(self._step)
        if self._measured is not None and self._measured[0] > self._step:
            self._measured = None

    # ---- saving -----------------------------------------------------------------------------------------------------

    def save_now(self, trainer: Trainer) -> str:
        """Save the current step, unless it is saved already, and wait until it is written. A collective.

        Call between two optimizer steps of a fit.

        Returns:
            Path of the checkpoint.

        Raises:
            CheckpointError: on every rank, if it was not saved.
        """
        try:
            self._settle(trainer)
        except CheckpointError as error:  # of an earlier save; try this one
            rank_zero_warn(str(error))
        last = self._records.last
        if last is None or last.step != trainer.global_step:
            self._save(trainer)
            self._settle(trainer)
            last = self._records.last
        if last is None or last.step != trainer.global_step:
            raise CheckpointError(f"Step {trainer.global_step} was not saved into {self._folder}.")
        return last.path

    def _save_once(self, trainer: Trainer) -> None:
        if self._saved_step != trainer.global_step and not is_dev_run(trainer):
            self._save(trainer)

    def _save_if_best(self, trainer: Trainer) -> None:
        if self.monitor is None or is_dev_run(trainer):
            return
        value = fresh_metrics(trainer).get(self.monitor)
        if value is None:
            return
        score = float(self._from_rank_zero(trainer, float(value)))
        self._measured = trainer.global_step, score
        if self._records.including(self._pending).is_among_best(score):
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        phases: Phases | None = getattr(trainer, "phases", None)  # absent on Lightning's own Trainer
        with nullcontext() if phases is None else phases.within(SAVING):
            self._save_step(trainer)

    def _save_step(self, trainer: Trainer) -> None:
        begin = time.perf_counter()
        self._settle(trainer)
        assert self._saver is not None
        step = trainer.global_step
        metrics = logged_metrics(trainer, self.monitor, self._measured)
        name = self._name.make(step, trainer.current_epoch, metrics)
        path, score = self._from_rank_zero(trainer, (join_path(self._folder, name), metrics.get(self.monitor or "")))
        self._pending = SaveRecord(path, step, score)
        self._saved_step = step
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
        content: Content = trainer.strategy.run_state(checkpoint)  # type: ignore[attr-defined]
        content.about |= {"metrics": metrics, "saved_by": _MARK, "monitor": self.monitor, "mode": self.mode}
        self._saver.save(content, path, self._delete_older, self._will_delete)
        self._blocked = time.perf_counter() - begin
        self._settle_at = step + 1
        if not self.asynchronous:
            self._settle(trainer)
        self._schedule.restart(step)

    def _prepare(self, trainer: Trainer) -> None:
        """Allocate memory for the copy after the first step, when optimizers have a state."""
        self._prepared = True
        strategy: Any = trainer.strategy
        # Not a complete checkpoint: dumping one calls user hooks, which belong to real saves.
        checkpoint = {"state_dict": strategy.lightning_module_state_dict()}
        if not self.save_weights_only:
            checkpoint["optimizer_states"] = [strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
        assert self._saver is not None
        self._saver.prepare(strategy.run_state(checkpoint).tensors)

    def _will_delete(self, newest: Manifest) -> bool:
        """Return on rank 0 whether the newest makes others obsolete, so that it must be verified."""
        assert self._pending is not None
        return bool(may_delete(self._folder, self.retention, self._pending.path, among=_is_by_callback))

    def _delete_older(self, newest: Manifest) -> None:
        """Delete obsolete checkpoints on rank 0, once all ranks have read the newest back."""
        assert self._pending is not None
        apply_retention(self._folder, self.retention, self._pending.path, verified=True, among=_is_by_callback)

    def _settle_if_done(self, trainer: Trainer) -> None:
        if self._pending is None or self._step < self._settle_at:
            return
        assert self._saver is not None
        if self._saver.all_done(self._agreement(trainer)):
            self._settle(trainer)
        elif trainer.world_size > 1:  # check after 1, 2, 4, 8, ... steps only, since it is a collective
            self._settle_at = self._step + max(1, self._step - self._saved_step)

    def _settle(self, trainer: Trainer) -> None:
        """Take the result of the last save, waiting for a pending one."""
        saved = None if self._saver is None else self._saver.take()
        if saved is None:
            return
        self._record(saved)
        if saved.error is not None:
            with self._errors_as_configured():
                raise saved.error

    def _record(self, saved: Saved) -> None:
        record, self._pending = self._pending, None
        self._schedule.record_cost(self._blocked, saved.written_seconds if self.asynchronous else 0.0)
        if saved.error is None or isinstance(saved.error, ClearingError):
            assert record is not None
            self._records.add(record)

    @contextmanager
    def _errors_as_configured(self) -> Iterator[None]:
        """Raise a save error or only warn of it, as ``on_error`` says."""
        try:
            yield
        except CheckpointError as error:
            if self.on_error == "raise":
                raise
            rank_zero_warn(f"{error} (Training continues without it: on_error='warn'.)")

    # ---- in-memory copies -------------------------------------------------------------------------------------------

    def _copy(self, trainer: Trainer) -> None:
        assert self.copies is not None
        strategy: Any = trainer.strategy
        content = strategy.run_state(trainer._checkpoint_connector.dump_checkpoint(False), complete=True)
        with self._errors_as_configured():
            self.copies.save(content, self._step)

    # ---- agreement --------------------------------------------------------------------------------------------------

    def _agreement(self, trainer: Trainer) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup | None = trainer.strategy.state.group()  # type: ignore[attr-defined]
        return group

    def _from_rank_zero(self, trainer: Trainer, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        group = self._agreement(trainer)
        return value if group is None else broadcast_value(value, 0, group)


def _is_by_callback(found: FoundCheckpoint) -> bool:
    return found.manifest.about.get("saved_by") == _MARK


def _new_group(trainer: Trainer) -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for use by one thread; ``None`` for a single process."""
    return gloo_group(_TIMEOUT) if trainer.world_size > 1 else None
