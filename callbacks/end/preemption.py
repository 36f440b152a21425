"""A run that is told to end saves its state first, and ends on all ranks at the same step."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trainwright.callbacks.end.notice import Told
from trainwright.callbacks.end.options import numbers_of, preemption_problems
from trainwright.callbacks.end.requeue import job_of, requeue
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.core.errors import CheckpointError

_log = logging.getLogger("trainwright")


class Preempted(SIGTERMException):
    """The run was told to end, and all ranks end now, at the same step.

    As a ``SystemExit`` it ends the process with :attr:`code` where nobody catches it.

    Attributes:
        told: by whom, and when.
        exit_code: of the process; :attr:`code` of a ``SystemExit``.
        checkpoint: the newest checkpoint of this run, ``""`` if there is none.
        saved: whether it holds the step at which the run ends.
    """

    def __init__(self, told: Told, code: int, checkpoint: str = "", saved: bool = False) -> None:
        super().__init__(code)
        self.exit_code = code
        self.told = told
        self.checkpoint = checkpoint
        self.saved = saved

    def __str__(self) -> str:
        return f"told to end by {self.told.reason}"


@dataclass(eq=False, repr=False)
class Preemption(Callback):
    """What a run does when it is told to end: by a signal, by a file that appears, or by what an address answers.

    ``trainwright.Trainer`` remembers the notice, whichever rank it came to, and about every ``check_seconds`` the ranks
    ask each other. Then all finish their optimizer step, save the run state with the first
    ``RunStateCheckpoint`` that saves more than weights (unless this step is saved
    already), and end by :class:`Preempted`. Nothing is saved within a signal handler. While a run validates, and where
    it only validates, tests or predicts, it ends after the batch. A Trainer without this callback has
    ``Preemption(signals=["SIGTERM"])``.

    Args:
        save: save the run state before the end; ``False`` (off): end after the step, without saving.
        signals: which of SIGTERM, SIGUSR1 and SIGUSR2 end the run. A handler that was there before is called as well.
        file: a path that is looked at by one rank of each node: once it exists the run ends; ``None``: off.
        url: an address that is asked by one rank of each node, such as that of a cloud's metadata, see
            :class:`~trainwright.callbacks.end.notice.NoticePoll`; ``None``: off.
        url_headers: headers that the address asks for, such as ``{"Metadata-Flavor": "Google"}``; ``None``: none.
        poll_seconds: seconds between two looks at ``file`` and ``url``.
        deadline_seconds: seconds from the notice until the process is gone. A state that cannot be saved by then is
            given up: the process names the last good checkpoint and ends; what it leaves half written is never taken
            for a checkpoint and is removed when the next run saves there. ``None``: no limit but the scheduler's.
        exit_code: of the process; ``None``: 128 plus the number of the signal (143 for SIGTERM, a file or an address).
        requeue: under SLURM, have the first rank run ``scontrol requeue`` for this job after the save; ``False``: off.
        check_seconds: about how often the ranks ask each other, one small all-reduce each time; at least once in 512
            micro-batches, and at most once in each.

    Raises:
        ValueError: naming everything that is impossible about the arguments.
    """

    save: bool = True
    signals: Sequence[str] = ("SIGTERM", "SIGUSR1")
    file: str | None = None
    url: str | None = None
    url_headers: Mapping[str, str] | None = None
    poll_seconds: float = 5.0
    deadline_seconds: float | None = 120.0
    exit_code: int | None = None
    requeue: bool = False
    check_seconds: float = 1.0

    def __post_init__(self) -> None:
        problems = preemption_problems(vars(self))
        if problems:
            raise ValueError("Preemption: " + "; ".join(problems))
        self.numbers = numbers_of(self.signals)
        self._settled: Told | None = None  # a notice for which everything is done but to end the process

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work: another Trainer, a second callback of this kind, a requeue of nothing."""
        connector = trainer._signal_connector
        if getattr(connector, "preemption", None) is not self:
            others = [each for each in trainer.callbacks if isinstance(each, Preemption)]  # type: ignore[attr-defined]
            raise ValueError(
                "Two Preemption callbacks: a run ends in one way. Keep one of them."
                if len(others) > 1
                else "Preemption needs trainwright.Trainer, whose ranks agree on when they end. Use it in the place of "
                "lightning.pytorch.Trainer, or leave Preemption out."
            )
        if not self.requeue or stage != TrainerFn.FITTING:
            return
        if job_of(os.environ) is None:
            raise ValueError("Preemption(requeue=True): SLURM_JOB_ID is not set, so there is no job to requeue.")
        if _saver_of(trainer) is None:
            raise ValueError(
                "Preemption(requeue=True) without a RunStateCheckpoint: the job would begin again where it began. Add "
                "RunStateCheckpoint()."
            )

    def code_for(self, told: Told) -> int:
        """Exit code of a run that was told to end by ``told``."""
        return 128 + told.signal if self.exit_code is None else self.exit_code

    def saves(self, trainer: Trainer) -> bool:
        """Whether there is something that would be saved now."""
        fits = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        return self.save and fits and not trainer.fast_dev_run and _saver_of(trainer) is not None  # type: ignore[attr-defined]

    def end(self, trainer: Trainer, told: Told) -> NoReturn:
        """Save and end; all ranks call this at the same step.

        Raises:
            Preempted: always, unless a rank fails meanwhile.
        """
        saver = _saver_of(trainer) if self.saves(trainer) else None
        path = ""
        if saver is None:
            self._say(trainer, f"told to end by {told.reason}; nothing is saved{self._why_not(trainer)}")
        else:
            path = self._saved(trainer, saver, told)
        self._settled = told
        if self.requeue and trainer.state.fn == TrainerFn.FITTING and trainer.is_global_zero:
            self._requeue()
        raise Preempted(told, self.code_for(told), path or last_good(trainer), bool(path))

    def give_up(self, trainer: Trainer, told: Told) -> None:
        """The deadline has passed: say what is left, from a thread, while the main thread may hold any lock."""
        if not trainer.is_global_zero:
            return
        settled = self._settled == told
        what = "the process had not ended" if settled else "the run state was not saved"
        limit = self.deadline_seconds  # none where a signal came before the run, which is given less
        within = "in time" if limit is None else f"within {limit:g} s (preemption.deadline_seconds)"
        _write(f"trainwright: told to end by {told.reason}; {what} {within}. {_last_good_text(trainer)}")
        if self.requeue and not settled:
            _write(f"trainwright: {requeue(os.environ) or 'the job is requeued'}")

    def _saved(self, trainer: Trainer, saver: RunStateCheckpoint, told: Told) -> str:
        """Save; the path of the checkpoint, ``""`` if that failed."""
        step = trainer.global_step
        # Said before as well: a scheduler may kill this process in the middle of it.
        self._say(
            trainer, f"told to end by {told.reason}; saving the run state of step {step}. {_last_good_text(trainer)}"
        )
        try:
            path = saver.save_now(trainer)
        except CheckpointError as error:
            self._say(trainer, f"step {step} was not saved: {error} {_last_good_text(trainer)}")
            return ""
        self._say(trainer, f"saved step {step}: {path}")
        return path

    def _why_not(self, trainer: Trainer) -> str:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return " (nothing is trained)"
        if not self.save:
            return f" (save=False). {_last_good_text(trainer)}"
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return " (fast_dev_run)"
        return " (there is no RunStateCheckpoint that saves more than weights)"

    def _requeue(self) -> None:
        problem = requeue(os.environ)
        _log.info("the job is requeued") if problem is None else _write(f"trainwright: {problem}")

    def _say(self, trainer: Trainer, text: str) -> None:
        _log.info(text)
        if trainer.is_global_zero:
            # Who reads that (`tee`) may have been told to end as well; the state is saved all the same.
            with suppress(OSError, ValueError):
                print(f"trainwright: {text}", file=sys.stderr, flush=True)


def last_good(trainer: Trainer) -> str:
    """The newest checkpoint that a run can go on from: its own, or the one that it went on from; ``""`` if none."""
    saver = _saver_of(trainer)
    path = "" if saver is None else saver.last_model_path
    return path or (trainer.ckpt_path if isinstance(trainer.ckpt_path, str) else "")


def _last_good_text(trainer: Trainer) -> str:
    path = last_good(trainer)
    return f"The last good checkpoint is {path}." if path else "There is no checkpoint yet."


def _saver_of(trainer: Trainer) -> RunStateCheckpoint | None:
    """Who saves the state when a run is told to end: one is enough, and time is short."""
    savers = [
        each
        for each in trainer.checkpoint_callbacks
        if isinstance(each, RunStateCheckpoint) and not each.save_weights_only
    ]
    return savers[0] if savers else None


def _write(text: str) -> None:
    """Write a line without Python's streams, whose locks another thread may hold; nobody need read it."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
