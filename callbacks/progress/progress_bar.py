"""Progress bar of rank 0; lines of text without a terminal."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from torch import Tensor

from trainwright.callbacks.progress.global_loss import losses_of
from trainwright.callbacks.progress.throughput import Throughput
from trainwright.callbacks.windows import StopsWithTraining
from trainwright.core.config.options import number, require


@dataclass(frozen=True)
class State:
    """The content of a display: a count of steps or batches, and notes."""

    title: str
    done: int
    total: float
    """``math.inf`` if unknown."""
    unit: str = "batch"
    notes: dict[str, str] = field(default_factory=dict)
    """Name -> formatted value, in display order."""


class ProgressBar(StopsWithTraining, LightningProgressBar):
    """Loss, samples or units per second, and time left; one more line during validation, test or prediction.

    Loss and speed come from :class:`GlobalLoss` and :class:`Throughput`; without these callbacks, or before their first
    values, from rank 0's last loss and its optimizer steps per second. Time left does not include validation. Values
    logged with ``prog_bar=True`` follow. Between two refreshes a step only reads the clock.

    Args:
        refresh_seconds: refresh interval in a terminal.
        line_seconds: interval between two lines without one (a file, a pipe).
        console: draws; ``None``: standard output.

    Raises:
        ValueError: if a time is not positive.
    """

    # The strategy may still be receiving the weights of this step.
    looks_at_parameters = False

    def __init__(
        self, refresh_seconds: float = 0.25, line_seconds: float = 10.0, console: Console | None = None
    ) -> None:
        super().__init__()
        rule = number(None, above=0, most=float("inf"), unit="seconds")
        require(self, float, rule, refresh_seconds=refresh_seconds, line_seconds=line_seconds)
        self.console = console or Console()
        self._period = refresh_seconds if self.console.is_terminal else line_seconds
        self._enabled = True
        self._display: Bars | Lines | None = None
        self._next = 0.0  # monotonic() of the next refresh
        self._timer = TrainingTimer()
        self._evaluation: State | None = None
        self._outputs: Any = None  # of the last training step

    @property
    def is_enabled(self) -> bool:
        """Visibility; Lightning checks it before printing through the bar."""
        return self._enabled

    def disable(self) -> None:
        """Stop showing anything."""
        self._enabled = False
        self._stop()

    def enable(self) -> None:
        """Show again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 without breaking the bar."""
        text = kwargs.get("sep", " ").join(map(str, args))
        if self._display is not None:
            self._display.print(text)
        elif self._enabled:
            self.console.print(text, markup=False, highlight=False)

    # ---- training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar."""
        self._timer.start(trainer.global_step)
        if self._open():
            self._show(self._train_state(trainer, None))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        """Refresh if due."""
        self._outputs = outputs
        if self._display is None or time.monotonic() < self._next:
            return
        self._show(self._train_state(trainer, outputs))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print a last line and release the terminal."""
        if self._display is not None:
            self._display.finish(self._train_state(trainer, self._outputs))
        self._stop()

    # ---- validation, test, prediction

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the display before training."""
        self._open()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a line for validation; pause the training clock."""
        self._timer.pause()
        self._begin("sanity check" if trainer.sanity_checking else "validation", trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the line."""
        self._end(trainer)
        self._timer.resume()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a line for test."""
        self._begin("test", trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a line for prediction."""
        self._begin("prediction", trainer)

    def on_predict_batch_end(self, *_: Any) -> None:
        """Count a batch."""
        if self._evaluation is None:
            return
        self._evaluation = replace(self._evaluation, done=self._evaluation.done + 1)
        if time.monotonic() >= self._next:
            self._show(self._evaluation)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end  # type: ignore[assignment]

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the line."""
        self._end(trainer)

    on_test_end = on_predict_end

    # ---- internal

    def _open(self) -> bool:
        if self._display is None and self._enabled:
            self._display = Bars(self.console) if self.console.is_terminal else Lines(self.console)
        return self._display is not None

    def _stop(self) -> None:
        """Release the terminal."""
        if self._display is not None:
            self._display.close()
        self._display = self._evaluation = self._outputs = None

    def _show(self, state: State) -> None:
        assert self._display is not None
        self._display.show(state)
        self._next = time.monotonic() + self._period

    def _begin(self, title: str, trainer: Any) -> None:
        if self._open():
            # Of this rank, unlike ``num_val_batches``.
            self._evaluation = State(title, 0, sum(trainer._active_loop._combined_loader.limits))
            self._show(self._evaluation)

    def _end(self, trainer: Trainer) -> None:
        if self._evaluation is None or self._display is None:
            return
        notes = {} if trainer.sanity_checking else _logged(trainer)
        self._display.finish(replace(self._evaluation, notes=notes))
        self._evaluation = None

    def _train_state(self, trainer: Trainer, outputs: Any) -> State:
        total = total_steps(trainer)
        notes = {}
        loss = _loss(trainer, outputs)
        if loss is not None:
            notes["loss"] = f"{loss:.4f}"
        rate = self._timer.steps_per_second(trainer.global_step)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        measured = next((c.rate for c in callbacks if isinstance(c, Throughput)), None)
        if measured is not None:
            notes["speed"] = f"{_short(measured[0])} {measured[1]}/s"
        elif rate:
            notes["speed"] = f"{_short(rate)} steps/s"
        if rate and math.isfinite(total):
            notes["left"] = _clock((total - trainer.global_step) / rate)
        return State("training", trainer.global_step, total, "step", {**notes, **_logged(trainer)})


class TrainingTimer:
    """Optimizer steps per second, excluding the first step and validation."""

    def __init__(self) -> None:
        self._first_step = 0
        self._begin: float | None = None
        self._paused_at: float | None = None

    def start(self, step: int) -> None:
        """Start at ``step``; the clock starts when the next step is done."""
        self._first_step, self._begin, self._paused_at = step, None, None

    def pause(self) -> None:
        """Pause the clock."""
        self._paused_at = time.monotonic()

    def resume(self) -> None:
        """Resume the clock."""
        if self._begin is not None and self._paused_at is not None:
            self._begin += time.monotonic() - self._paused_at
        self._paused_at = None

    def steps_per_second(self, step: int) -> float | None:
        """Return the mean rate so far; ``None`` until two calls lie at different steps."""
        now = time.monotonic() if self._paused_at is None else self._paused_at
        if self._begin is None:
            if step > self._first_step:
                self._first_step, self._begin = step, now
            return None
        has_passed = step > self._first_step and now > self._begin
        return (step - self._first_step) / (now - self._begin) if has_passed else None


class Bars:
    """Rich bars in a terminal, drawn on demand, without a thread."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[notes]}"),
            console=console,
            auto_refresh=False,
        )
        self._tasks: dict[str, TaskID] = {}
        self._progress.start()

    def show(self, state: State) -> None:
        """Draw the bar of ``state``, a new one for a new title."""
        total = state.total if math.isfinite(state.total) else None
        shown: dict[str, Any] = {"completed": state.done, "count": _count(state), "notes": _notes(state)}
        if state.title in self._tasks:
            self._progress.update(self._tasks[state.title], total=total, **shown)
        else:
            self._tasks[state.title] = self._progress.add_task(state.title, total=total, **shown)
        self._progress.refresh()

    def finish(self, state: State) -> None:
        """Replace the bar by a final line."""
        task = self._tasks.pop(state.title, None)
        if task is not None:
            self._progress.remove_task(task)
        self.print(_line(state))

    def print(self, text: str) -> None:
        """Print above the bars."""
        self._progress.console.print(text, markup=False, highlight=False)
        self._progress.refresh()

    def close(self) -> None:
        """Stop drawing."""
        self._progress.stop()


class Lines:
    """One line of text per refresh."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, state: State) -> None:
        """Print the line of ``state``; nothing before the first batch."""
        if state.done:
            self.print(_line(state))

    def finish(self, state: State) -> None:
        """Print the last line."""
        self.print(_line(state))

    def print(self, text: str) -> None:
        """Print an unwrapped line and flush, since a file may be followed."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)
        self._console.file.flush()

    def close(self) -> None:
        """Do nothing."""


def total_steps(trainer: Trainer) -> float:
    """Return the optimizer steps at which ``max_steps`` or ``max_epochs`` ends training; infinite if unknown."""
    by_steps = trainer.max_steps if trainer.max_steps != -1 else math.inf
    if trainer.max_epochs is None or trainer.max_epochs == -1 or math.isinf(trainer.num_training_batches):
        return by_steps
    per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    # With several optimizers each counts its own step.
    return min(by_steps, trainer.max_epochs * per_epoch * max(1, len(trainer.optimizers)))


def _loss(trainer: Trainer, outputs: Any) -> float | None:
    collected = losses_of(trainer)
    if collected is not None and collected.latest is not None:
        return collected.latest
    weights = getattr(trainer, "token_weights", None)
    if weights is not None:  # those of micro-batches are parts of a step's mean
        return None if weights.step_loss is None else weights.step_loss.item()
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss.item() * trainer.accumulate_grad_batches if isinstance(loss, Tensor) else None


def _logged(trainer: Trainer) -> dict[str, str]:
    return {name: f"{value:.4g}" for name, value in trainer.progress_bar_metrics.items()}


def _count(state: State) -> str:
    return f"{state.done}/{state.total:.0f}" if math.isfinite(state.total) else f"{state.done}"


def _notes(state: State) -> str:
    return "  ".join(f"{name} {value}" for name, value in state.notes.items())


def _line(state: State) -> str:
    return f"{state.title} {state.unit} {_count(state)}  {_notes(state)}".rstrip()


def _short(value: float) -> str:
    """Format with three digits and a power of 1000: 1234567 is '1.23M'."""
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            return f"{value / power:.3g}{letter}"
    return f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, secs = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
