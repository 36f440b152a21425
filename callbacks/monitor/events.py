"""What happens to a run besides its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.callbacks.end.preemption import Preempted
from trainwright.callbacks.monitor.hook_phases import phases_of
from trainwright.callbacks.monitor.records import read_records, records_path, tell
from trainwright.callbacks.steps import steps_done
from trainwright.checkpoint.memory.snapshots import Snapshot
from trainwright.core.run.phases import SAVING, VALIDATION
from trainwright.core.run.traits import traits_of

_TIMED = {SAVING: "checkpoint", VALIDATION: "validation"}


class Events(Callback):
    """Tell records ``event`` of every rank: ``what``, a ``text`` and the ``seconds`` that it took, 0 where that is
    unknown.

    - ``checkpoint`` and ``validation``, with the seconds for which training stood still (a validation, without the
      checkpoints within it)
    - ``rollback``: training goes on from an earlier state in memory
    - ``preempted``: the run was told to end; ``fault``: it ends with an error, or is left to go on as other ranks
    - ``restarted``: the run goes on in its directory; ``recovered``: a rank goes on from a state in memory

    Args:
        run_dir: of the run; ``None``: it is not known whether a run goes on.
    """

    looks_at_parameters = False

    def __init__(self, run_dir: str | None = None) -> None:
        self.run_dir = run_dir
        self._goes_on = False
        self._end: Callable[[], None] | None = None
        self._what = ""  # that is under way
        self._since = 0.0
        self._spent = 0.0  # before it was interrupted
        self._under: list[float] = []  # spent on what a checkpoint interrupts

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """See whether there was something before, and listen."""
        if stage != "fit":
            return
        self._stop()
        path = None if self.run_dir is None else records_path(self.run_dir, trainer.global_rank)
        self._goes_on = path is not None and next(read_records(path), None) is not None
        self._what = ""
        self._end = phases_of(trainer).listen(lambda phase: self._hear(trainer, phase))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell that the run goes on."""
        ours: Any = trainer
        step = steps_done(trainer)
        if isinstance(ours.ckpt_path, Snapshot) or traits_of(ours.strategy).joins:
            self._tell(trainer, "recovered", f"goes on from a copy in memory of step {step}")
        elif self._goes_on:
            self._tell(trainer, "restarted", f"goes on from step {step}")
        self._goes_on = False

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell of it."""
        self._tell(trainer, "rollback", f"back to step {steps_done(trainer)} in memory")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell why the run ends."""
        what = "preempted" if isinstance(exception, Preempted) else "fault"
        lines = str(exception).strip().splitlines()
        name = type(exception).__name__
        self._tell(trainer, what, f"{name}: {lines[0]}" if lines else name)
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Listen no more."""
        self._stop()

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None

    def _hear(self, trainer: Trainer, phase: str) -> None:
        what = _TIMED.get(phase, "")
        if what == self._what:
            return
        now = time.perf_counter()
        if self._what:
            self._spent += now - self._since
        if self._what == "validation" and what == "checkpoint":
            self._under.append(self._spent)  # goes on afterwards
        elif self._what:
            self._tell(trainer, self._what, "", self._spent)
        self._spent = 0.0
        if what == "validation" and self._under:
            self._spent = self._under.pop()
        self._what, self._since = what, now

    def _tell(self, trainer: Trainer, what: str, text: str, seconds: float = 0.0) -> None:
        tell(trainer, "event", {"what": what, "text": text, "seconds": seconds})
