"""Preemption: save the run state, then end all ranks at the same step."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trainwright.callbacks.end.notice import StopNotice
from trainwright.callbacks.end.options import PreemptionOptions
from trainwright.callbacks.end.requeue import job_of, requeue
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.core.config.options import refuse
from trainwright.core.errors import CheckpointError

_log = logging.getLogger("trainwright")


class Preempted(SIGTERMException):
    """Raised on all ranks, at the same step, after a stop notice. Uncaught, it ends the process with ``code``.

    Args:
        told: the notice.
        code: exit code of the process; also the attribute ``exit_code``.
        checkpoint: the newest checkpoint of this run, ``""`` if there is none.
        saved: whether it holds the last step.
    """

    def __init__(self, told: StopNotice, code: int, checkpoint: str = "", saved: bool = False) -> None:
        super().__init__(code)
        self.exit_code = code
        self.told = told
        self.checkpoint = checkpoint
        self.saved = saved

    def __str__(self) -> str:
        return f"stopped by {self.told.reason}"


@dataclass(eq=False, repr=False)
class Preemption(PreemptionOptions, Callback):
    """Graceful stop on a signal, on a file that appears, or on the answer of an address.

    ``trainwright.Trainer`` records the notice on any rank, and about every ``check_seconds`` the ranks agree on it. All
    then finish their optimizer step, save the run state with the first ``RunStateCheckpoint`` that saves more than
    weights (unless this step is saved already), and raise :class:`Preempted`. Nothing is saved within a signal
    handler. Validation, test and prediction end after the current batch. A Trainer without this callback uses
    ``Preemption(signals=["SIGTERM"])``.

    Args:
        save: save the run state before the end; ``False``: end after the step without saving.
        signals: which of SIGTERM, SIGUSR1 and SIGUSR2 end the run. A previous handler is called as well.
        file: a path that one rank of each node polls: once it exists the run ends; ``None``: off.
        url: an address that one rank of each node polls, such as a cloud's metadata server, see
            :class:`~trainwright.callbacks.end.notice.NoticePoll`; ``None``: off.
        url_headers: request headers, such as ``{"Metadata-Flavor": "Google"}``; ``None``: none.
        poll_seconds: poll interval of ``file`` and ``url``.
        deadline_seconds: seconds from the notice until the process has ended. A save that takes longer is abandoned:
            the process names the last good checkpoint and ends; the unfinished one is never resumed from, and the next
            run that saves there removes it. ``None``: no limit.
        exit_code: of the process; ``None``: 128 plus the number of the signal (143 for SIGTERM, a file or an address).
        requeue: under SLURM, run ``scontrol requeue`` for this job after the save; ``False``: off.
        check_seconds: about how often the ranks agree, by one small all-reduce; at least once in 512 micro-batches and
            at most once per micro-batch.

    Raises:
        ValueError: naming all invalid arguments.
    """

    def __post_init__(self) -> None:
        refuse(self.option_problems(), "Preemption")
        self.numbers = tuple(int(signal.Signals[name]) for name in self.signals)
        self._settled: StopNotice | None = None  # a notice for which all is done but to end the process

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise for another Trainer, a second Preemption, or a requeue without a job or a checkpoint."""
        connector = trainer._signal_connector
        if getattr(connector, "preemption", None) is not self:
            others = [each for each in trainer.callbacks if isinstance(each, Preemption)]  # type: ignore[attr-defined]
            raise ValueError(
                "Two Preemption callbacks: only one is allowed. Remove the others."
                if len(others) > 1
                else "Preemption needs trainwright.Trainer, whose ranks agree on the step to end at. Use it instead of "
                "lightning.pytorch.Trainer, or leave Preemption out."
            )
        if not self.requeue or stage != TrainerFn.FITTING:
            return
        if job_of(os.environ) is None:
            raise ValueError("Preemption(requeue=True): SLURM_JOB_ID is not set, so there is no job to requeue.")
        if _saver_of(trainer) is None:
            raise ValueError(
                "Preemption(requeue=True) without a RunStateCheckpoint: the job would start from scratch. Add it."
            )

    def code_for(self, notice: StopNotice) -> int:
        """Return the exit code of a run that ``notice`` ended."""
        return 128 + notice.signal if self.exit_code is None else self.exit_code

    def end(self, trainer: Trainer, notice: StopNotice) -> NoReturn:
        """Save and end; called on all ranks at the same step.

        Raises:
            Preempted: always, unless a rank fails.
        """
        path, saver, why_not = "", _saver_of(trainer), self._why_not(trainer)
        if saver is None or why_not is not None:
            why_not = why_not or " (there is no RunStateCheckpoint that saves more than weights)"
            self._say(trainer, f"stopping on {notice.reason}; nothing is saved{why_not}")
        else:
            path = self._save(trainer, saver, notice)
        self._settled = notice
        if self.requeue and trainer.state.fn == TrainerFn.FITTING and trainer.is_global_zero:
            problem = requeue(os.environ)
            _log.info("the job is requeued") if problem is None else _write(f"trainwright: {problem}")
        raise Preempted(notice, self.code_for(notice), path or last_good(trainer), bool(path))

    def give_up(self, trainer: Trainer, notice: StopNotice) -> None:
        """Report a missed deadline; runs in a thread, while the main thread may hold any lock."""
        if not trainer.is_global_zero:
            return
        settled = self._settled == notice
        what = "the process had not ended" if settled else "the run state was not saved"
        limit = self.deadline_seconds  # no limit for a signal before the run, which has a shorter deadline
        within = "in time" if limit is None else f"within {limit:g} s (preemption.deadline_seconds)"
        _write(f"trainwright: stopping on {notice.reason}; {what} {within}. {_last_good_text(trainer)}")
        if self.requeue and not settled:
            _write(f"trainwright: {requeue(os.environ) or 'the job is requeued'}")

    def _save(self, trainer: Trainer, saver: RunStateCheckpoint, notice: StopNotice) -> str:
        """Save and return the path of the checkpoint, ``""`` on failure."""
        step = trainer.global_step
        # Printed before as well: a scheduler may kill this process while it saves.
        self._say(
            trainer, f"stopping on {notice.reason}; saving the run state of step {step}. {_last_good_text(trainer)}"
        )
        try:
            path = saver.save_now(trainer)
        except CheckpointError as error:
            self._say(trainer, f"step {step} was not saved: {error} {_last_good_text(trainer)}")
            return ""
        self._say(trainer, f"saved step {step}: {path}")
        return path

    def _why_not(self, trainer: Trainer) -> str | None:
        """Return why there is nothing to save now; ``None`` if there may be."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return " (nothing is trained)"
        if not self.save:
            return f" (save=False). {_last_good_text(trainer)}"
        return " (fast_dev_run)" if trainer.fast_dev_run else None  # type: ignore[attr-defined]

    def _say(self, trainer: Trainer, text: str) -> None:
        _log.info(text)
        if trainer.is_global_zero:
            # The reader (`tee`) may have been stopped as well; the state is saved all the same.
            with suppress(OSError, ValueError):
                print(f"trainwright: {text}", file=sys.stderr, flush=True)


def last_good(trainer: Trainer) -> str:
    """Return the newest checkpoint to resume: the run's own, or the one it resumed from; ``""`` if none."""
    saver = _saver_of(trainer)
    path = "" if saver is None else saver.last_model_path
    return path or (trainer.ckpt_path if isinstance(trainer.ckpt_path, str) else "")


def _last_good_text(trainer: Trainer) -> str:
    path = last_good(trainer)
    return f"The last good checkpoint is {path}." if path else "There is no checkpoint yet."


def _saver_of(trainer: Trainer) -> RunStateCheckpoint | None:
    """Return the callback that saves the state on a stop: the first one that saves more than weights."""
    savers = (each for each in trainer.checkpoint_callbacks if isinstance(each, RunStateCheckpoint))
    return next((each for each in savers if not each.save_weights_only), None)


def _write(text: str) -> None:
    """Write a line without Python's streams, whose locks another thread may hold."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
