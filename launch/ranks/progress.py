"""Progress of a rank, recorded for the launching process."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer

from trainwright.callbacks.windows import Listening
from trainwright.core.failures.records import AttemptStart, StepRecord, write_attempt_start
from trainwright.core.run.phases import DATA
from trainwright.trainer.trainer import Trainer


class BeginningReport(Callback):
    """Record of the start of training.

    Args:
        folder: of the records of this attempt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Write it on rank 0."""
        assert isinstance(trainer, Trainer)
        if trainer.is_global_zero:
            batch = trainer.global_batch
            start = AttemptStart(trainer.global_step, None if batch is None else batch.size)
            write_attempt_start(self._folder, start)


class ProgressReport(Listening, BeginningReport):
    """Record of this rank's step at every micro-batch, and of the start of training.

    Args:
        folder: of the records of this attempt.
    """

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Record the start, and listen for steps."""
        assert isinstance(trainer, Trainer)
        record = StepRecord(self._folder, trainer.global_rank)
        record.write(trainer.global_step)
        super().on_train_start(trainer, pl_module)

        def note(phase: str) -> None:
            if phase == DATA:
                record.write(trainer.global_step)

        self._stop()
        self._end_listening = trainer.phases.listen(note)
