"""The watchdog's callback in each rank: it reports progress and answers questions."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.callbacks.monitor.hook_phases import phases_of
from trainwright.core.config.options import number, refuse, value_problems
from trainwright.core.run import phases
from trainwright.launch.watchdog.answers import Answerer
from trainwright.launch.watchdog.boxes import ENDING, EVALUATION, EVALUATION_END, FIRST_DATA, HangLimits, ProgressBox
from trainwright.launch.watchdog.calls import record_calls, set_trace_folder
from trainwright.launch.watchdog.monitor import VARIABLE

# Phases of a step that its next batch follows.
_WITHIN_STEPS = (phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER, phases.HOOKS)


def _starts(phase: str) -> Any:
    """Return a hook that starts a phase."""
    return lambda self, *_: self._begin(phase)


@dataclass(eq=False, repr=False)
class Watchdog(Callback):
    """Callback that detects a hang, reports which rank blocks which others in which call, and kills that rank.

    Every phase of a run has its own limit, learned from its durations so far; see :class:`HangLimits`. When a phase
    exceeds its limit, stacks and collective calls of all ranks of the machine are collected; so they are at once when a
    signal has stopped a rank (SIGSTOP) while another one of the machine runs. The report is written to
    ``logs/hang_1.txt`` in the run directory, its first lines to standard error, and the rank at fault is killed
    (SIGKILL), so that a launcher with restarts (``torchrun --max-restarts``) can restart, and any other ends the run.

    The ``trainwright`` command adds this callback to every rank and monitors by itself (``launch.hang_timeout``). In
    your own script, under any launcher, give it to the Trainer: local rank 0 of each machine then starts a monitoring
    process with negligible cost. Create it before the process group, as with any Trainer argument, so that torch
    records the calls. Phases of a plain Lightning Trainer are those that its hooks show.

    It costs about a microsecond per phase of a step, and one small collective at setup.

    Args:
        hang_timeout: ``"auto"`` = learned; or seconds for any phase; ``None`` = off.
        safety_factor: how many times longer than ever before a phase may take.
        floor_seconds: lower bound of the limit.
        first_timeout: limit in seconds of phases without history: setup, the first steps, the first validation, the
            first checkpoint.

    Raises:
        ValueError: if one of them is out of range.
    """

    hang_timeout: str | float | None = number("auto", "auto", above=0, unit="seconds", null="for off")
    safety_factor: float = number(5.0, least=1, unit="below 1, what took long once would be a hang the next time")
    floor_seconds: float = number(30.0, above=0, most=math.inf)
    first_timeout: float = number(1800.0, above=0, most=math.inf)

    def __post_init__(self) -> None:
        refuse(value_problems(Watchdog, vars(self)), "Watchdog")
        self.limits: HangLimits | None = None
        if self.hang_timeout is not None:
            self.limits = HangLimits.of(self.hang_timeout, self.safety_factor, self.floor_seconds, self.first_timeout)
        self._box: ProgressBox | None = None
        self._answerer: Answerer | None = None
        self._end_listening: Callable[[], None] = lambda: None
        self._guardian: Any = None
        if self.limits is not None:
            record_calls()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take this rank's box, and start a monitoring process unless the launching process monitors."""
        global _active
        if self.limits is None or self._box is not None:
            return
        if _active is not None:
            _active._stop()  # of a run in this process that failed
        _active = self
        place = json.loads(os.environ[VARIABLE]) if VARIABLE in os.environ else self._start_guardian(trainer)
        try:
            box = ProgressBox(place["boxes"], place["box"], trainer.global_rank)
        except FileNotFoundError as error:
            raise RuntimeError(
                f"rank {trainer.global_rank} does not see the process that watches the ranks of its machine "
                f"({place['boxes']}); it is gone, or each rank is in a container of its own. Turn the watchdog off: "
                "Watchdog(hang_timeout=None), or launch.hang_timeout=null."
            ) from error
        self._answerer = Answerer(Path(place["folder"]), place["box"])
        self._answerer.start()
        set_trace_folder(Path(trainer.default_root_dir) / "logs")
        self._listen(trainer, box)
        self._box = box

    def _listen(self, trainer: Trainer, box: ProgressBox) -> None:
        loop = trainer.fit_loop.epoch_loop

        def begin(phase: str) -> None:
            if phase == phases.DATA:
                box.count(loop._batches_that_stepped)
                # The start of an epoch starts data loader workers, which takes its own time.
                phase = phases.DATA if box.phase in _WITHIN_STEPS else FIRST_DATA
            box.begin(phase)

        self._end_listening = phases_of(trainer).listen(begin)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop being watched."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Record this rank's calls; from here on cleaning up has no limit but that of ending."""
        if self._answerer is not None:
            self._answerer.record_failure(exception)
        self._begin(ENDING)

    # ---- outside of training ----------------------------------------------------------------------------------------

    on_sanity_check_start = on_validation_batch_start = _starts(EVALUATION)
    on_test_batch_start = on_predict_batch_start = _starts(EVALUATION)
    # Metrics at the end of an evaluation take longer than a batch.
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _starts(EVALUATION_END)

    def on_fit_end(self, *_: Any) -> None:
        """Start the phase in which loggers and strategies finish."""
        self._begin(ENDING)

    def _begin(self, phase: str) -> None:
        if self._box is not None:
            self._box.begin(phase)

    # ---- the monitoring process --------------------------------------------------------------------------------------

    def _start_guardian(self, trainer: Trainer) -> dict[str, Any]:
        from trainwright.launch.watchdog.guardian import Guardian, agree

        assert self.limits is not None
        if trainer.local_rank == 0:
            self._guardian = Guardian(trainer, self.limits)
        return agree(trainer, None if self._guardian is None else self._guardian.places)

    def _stop(self) -> None:
        self._end_listening()
        if self._answerer is not None:
            self._answerer.stop()
        if self._box is not None:
            self._box.close()
        if self._guardian is not None:
            self._guardian.stop()
        self._box = self._answerer = self._guardian = None


# A process is watched for one run at a time.
_active: Watchdog | None = None
