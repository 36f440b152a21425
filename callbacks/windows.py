"""Base callbacks: windows of optimizer steps, and work that stops with training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer

from trainwright.callbacks.step_clock import PhaseClock
from trainwright.callbacks.steps import step_number
from trainwright.core.config.options import number, require

Clock = TypeVar("Clock", bound=PhaseClock)


class Windowed(Callback):
    """A callback that reports once per window of optimizer steps.

    Args:
        every_n_steps: optimizer steps of a window; ``None``: the Trainer's ``log_every_n_steps`` (there, 0 is off).

    Raises:
        ValueError: if ``every_n_steps`` is less than 1.
    """

    # The strategy may still be receiving the weights of a step that has ended.
    looks_at_parameters = False
    # Steps before the first window: compilation, warm caches, connections.
    _warm_up = 0

    def __init__(self, every_n_steps: int | None = None) -> None:
        rule = number(None, least=1, unit="optimizer steps", null="for the Trainer's log_every_n_steps")
        require(self, int | None, rule, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._window = 0  # 0 is off
        self._seen = 0  # ``global_step`` after the last step
        self._done = 0  # steps in this window; negative while warming up

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting steps."""
        every = self.every_n_steps
        self._window = trainer.log_every_n_steps if every is None else every  # type: ignore[attr-defined]
        self.on_gone_back(trainer, pl_module)

    def on_gone_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a new window, warm-up included, at the restored step."""
        self._seen = trainer.global_step
        self._done = -self._warm_up

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report at the end of a window. Steps end on all ranks alike, since loop progress alone decides."""
        if trainer.global_step != self._seen:
            self._seen = trainer.global_step
            self._end_step(trainer, step_number(trainer))

    def _end_step(self, trainer: Trainer, step: int) -> None:
        """Count an optimizer step."""
        self._done += 1
        if self._window and self._done == 0:
            self._begin(trainer, step)
        elif self._done > 0 and self._ends_window(step):
            self._report(trainer, step)
            self._done = 0

    def _report_rest(self, trainer: Trainer) -> None:
        """Report an incomplete window."""
        if self._window and self._done > 0:
            self._report(trainer, step_number(trainer) - 1)

    def _ends_window(self, step: int) -> bool:
        """Return whether ``step`` closes a window."""
        return bool(self._window) and (step + 1) % self._window == 0

    def _in_last_step(self, trainer: Trainer) -> bool:
        """Return whether the present step closes a window."""
        return self._ends_window(step_number(trainer))

    def _begin(self, trainer: Trainer, step: int) -> None:
        """Begin to measure; ``step`` was the last one of the warm-up."""

    def _report(self, trainer: Trainer, step: int) -> None:
        """Report a window, of which ``step`` is the last one."""


class Timed(Windowed):
    """A callback that measures the time of a window, without validation."""

    _since = 0.0  # start of the window, moved by pauses

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pause the clock."""
        self._since -= time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume the clock."""
        self._since += time.perf_counter()

    def _begin(self, trainer: Trainer, step: int) -> None:
        self._since = time.perf_counter()

    def _seconds(self) -> float:
        return time.perf_counter() - self._since


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


class Listening(StopsWithTraining):
    """A callback that listens to something until training ends."""

    _end_listening: Callable[[], object] = staticmethod(lambda: None)

    def _stop(self) -> None:
        self._end_listening()


class Clocked(StopsWithTraining, Generic[Clock]):
    """A callback whose clock runs while it measures."""

    _clock: Clock | None = None

    @property
    def _running_clock(self) -> Clock:
        assert self._clock is not None
        return self._clock

    def _stop(self) -> None:
        super()._stop()
        if self._clock is not None:
            self._clock.stop()
            self._clock = None


class Measured(Windowed):
    """A callback whose windows begin after the warm-up, so that all but the last, which is reported too, are whole."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report an incomplete window."""
        self._report_rest(trainer)

    def _ends_window(self, step: int) -> bool:
        return self._done == self._window
