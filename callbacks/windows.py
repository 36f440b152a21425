"""What callbacks that look at a run once a window of optimizer steps have in common."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.callbacks.steps import StepCounter, require_window, window_steps


class Windowed(Callback):
    """A callback of windows: counts steps, and knows when a window has ended.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (there, 0 is off).

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        require_window(every_n_steps, self)
        self.every_n_steps = every_n_steps
        self._steps = StepCounter()
        self._window = 0  # 0 is off

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count steps."""
        self._steps.start(trainer)
        self._window = window_steps(self.every_n_steps, trainer)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count steps from there."""
        self._steps.start(trainer)

    def _ended(self, trainer: Trainer) -> int | None:
        """In ``on_train_batch_end``: the number of the step with which a window has ended; ``None``: none has."""
        step = self._steps.ended(trainer)
        return step if step is not None and self._ends_window(step) else None

    def _ends_window(self, step: int) -> bool:
        """Whether a step is the last of a window."""
        return bool(self._window) and (step + 1) % self._window == 0


class Measuring(Callback):
    """A callback that measures until training ends, with an error too: what is left of a window is then not told, since
    other ranks need not be there.
    """

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Measure no more."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Measure no more."""
        self._stop()

    def _stop(self) -> None:
        """Measure no more; may be called again, and before anything was measured."""
        raise NotImplementedError
