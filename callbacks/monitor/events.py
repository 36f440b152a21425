"""Events of a run besides its steps."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from trainwright.callbacks.end.preemption import Preempted
from trainwright.callbacks.monitor.hook_phases import phases_of
from trainwright.callbacks.monitor.records import emit, read_records, records_path
from trainwright.callbacks.steps import steps_done
from trainwright.callbacks.windows import Listening
from trainwright.checkpoint.memory.snapshots import Snapshot
from trainwright.core.failures.error_text import named_line
from trainwright.core.run.phases import SAVING, VALIDATION
from trainwright.core.run.traits import traits_of

_TIMED = {SAVING: "checkpoint", VALIDATION: "validation"}


class Events(Listening):
    """Emit ``event`` records on every rank: ``what``, a ``text`` and ``seconds`` (0 if unknown).

    - ``checkpoint`` and ``validation``, with the seconds for which training was blocked (of a validation, without the
      checkpoints within it)
    - ``rollback``: training rolled back to an in-memory copy
    - ``preempted``: the run was asked to stop; ``fault``: it ends with an error, or to continue with other ranks
    - ``restarted``: the run resumes in its directory; ``recovered``: a rank resumes an in-memory copy

    Args:
        run_dir: of the run; ``None``: restarts are not detected.
    """

    def __init__(self, run_dir: str | None = None) -> None:
        self.run_dir = run_dir
        self._is_restart = False
        self._what = ""  # in progress
        self._since = 0.0
        self._spent: dict[str, float] = defaultdict(float)  # seconds so far; a checkpoint may interrupt a validation

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Detect a restart, and start listening to phases."""
        if stage != "fit":
            return
        self._stop()
        path = None if self.run_dir is None else records_path(self.run_dir, trainer.global_rank)
        self._is_restart = path is not None and next(read_records(path), None) is not None
        self._what = ""
        self._end_listening = phases_of(trainer).listen(lambda phase: self._hear(trainer, phase))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a restart or a recovery."""
        ours: Any = trainer
        step = steps_done(trainer)
        if isinstance(ours.ckpt_path, Snapshot) or traits_of(ours.strategy).joins:
            self._emit(trainer, "recovered", f"resumed an in-memory copy of step {step}")
        elif self._is_restart:
            self._emit(trainer, "restarted", f"resumed at step {step}")
        self._is_restart = False

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a rollback."""
        self._emit(trainer, "rollback", f"rolled back to step {steps_done(trainer)} in memory")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report why the run ends."""
        what = "preempted" if isinstance(exception, Preempted) else "fault"
        self._emit(trainer, what, named_line(exception))
        super().on_exception(trainer, pl_module, exception)

    def _hear(self, trainer: Trainer, phase: str) -> None:
        before, self._what, now = self._what, _TIMED.get(phase, ""), time.perf_counter()
        self._spent[before] += now - self._since
        self._since = now
        if before not in ("", self._what) and (before, self._what) != ("validation", "checkpoint"):
            self._emit(trainer, before, "", self._spent.pop(before))

    def _emit(self, trainer: Trainer, what: str, text: str, seconds: float = 0.0) -> None:
        emit(trainer, "event", {"what": what, "text": text, "seconds": seconds})
