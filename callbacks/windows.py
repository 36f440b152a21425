"""Base callbacks: windows of optimizer steps, and work that stops with training."""

from __future__ import annotations

from typing import Generic, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.callbacks.step_clock import PhaseClock
from trainwright.callbacks.steps import StepCounter, window_steps
from trainwright.core.config.options import number, require

Clock = TypeVar("Clock", bound=PhaseClock)


class Windowed(Callback):
    """A callback that acts once per window of optimizer steps.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (there, 0 is off).

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        rule = number(None, least=1, unit="optimizer steps", null="for the Trainer's log_every_n_steps")
        require(self, int | None, rule, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._steps = StepCounter()
        self._window = 0  # 0 is off

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting steps."""
        self._steps.start(trainer)
        self._window = window_steps(self.every_n_steps, trainer)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from the restored step."""
        self._steps.start(trainer)

    def _ended(self, trainer: Trainer) -> int | None:
        """Return in ``on_train_batch_end`` the number of the step that closed a window, else ``None``."""
        step = self._steps.ended(trainer)
        return step if step is not None and self._ends_window(step) else None

    def _ends_window(self, step: int) -> bool:
        """Return whether ``step`` closes a window."""
        return bool(self._window) and (step + 1) % self._window == 0


class StopsWithTraining(Callback):
    """A callback that stops measuring or listening when training ends or fails.

    An incomplete window is dropped, since reporting it may be a collective.
    """

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop."""
        super().on_exception(trainer, pl_module, exception)
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop."""
        super().teardown(trainer, pl_module, stage)
        self._stop()

    def _stop(self) -> None:
        """Stop. Idempotent."""
        raise NotImplementedError


class Clocked(StopsWithTraining, Generic[Clock]):
    """A callback whose clock runs while it measures."""

    _clock: Clock | None = None

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.stop()
            self._clock = None
