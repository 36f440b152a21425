import math
import re
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from lightning.pytorch.callbacks import TQDMProgressBar

from tests.callbacks.modules import QUIET, Paper, Regression, loader, train
from trainwright import Trainer
from trainwright.callbacks.progress.global_loss import GlobalLoss
from trainwright.callbacks.progress.progress_bar import (
    ProgressBar,
    State,
    TrainingTimer,
    _clock,
    _loss,
    _short,
    total_steps,
)
from trainwright.callbacks.progress.throughput import Throughput

SHOWN = {"enable_progress_bar": True}
QUIET = {**QUIET, **SHOWN}


plain = partial(Paper, force_terminal=False)
terminal = partial(Paper, force_terminal=True, force_interactive=True)


def fit(console: Paper, *callbacks: Any, **kwargs: Any) -> str:
    """Return the output of a progress bar."""
    bar = ProgressBar(refresh_seconds=1e-6, line_seconds=1e-6, console=console)
    train(*callbacks, bar, **{"max_steps": 6, "val_data": loader(8, 4), "logger": False, **SHOWN, **kwargs})
    return console.text


def test_plain_lines() -> None:
    lines = fit(plain(), GlobalLoss(1), Throughput(1)).splitlines()
    training = [line for line in lines if line.startswith("training")]
    assert re.fullmatch(r"training step 1/6  loss \d+\.\d{4}", training[0])
    assert re.fullmatch(r"training step 5/6  loss \d+\.\d{4}  speed [\d.]+k? pixels/s  left 0:00", training[4]), (
        training[4]
    )
    assert re.fullmatch(r"validation batch 2/2  val_loss [\d.]+", lines[-2])
    assert re.match(r"training step 6/6  loss .* val_loss [\d.]+$", lines[-1])
    assert "\x1b" not in "".join(lines)


def test_own_loss_and_speed() -> None:
    module = Regression()
    lines = fit(plain(), module=module, max_steps=4, accumulate_grad_batches=2, val_data=None).splitlines()
    assert f"training step 4/4  loss {module.losses[7]:.4f}" in lines[-2]
    assert "steps/s" in lines[-2]


@pytest.mark.parametrize(("of_step", "shown"), [(torch.tensor(2.5), 2.5), (None, None)])
def test_loss_weighted_by_tokens(of_step: Any, shown: float | None) -> None:
    """A micro-batch's loss is only a part of the mean over a step's tokens."""
    weights = SimpleNamespace(step_loss=of_step)
    trainer: Any = SimpleNamespace(callbacks=[], token_weights=weights, accumulate_grad_batches=2)
    assert _loss(trainer, {"loss": torch.tensor(1.0)}) == shown


def test_terminal_bar() -> None:
    shown = fit(terminal(), GlobalLoss(1), Throughput(1))
    assert "━" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is hidden and shown once
    finished = [line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines() if "step 6/6" in line]
    assert finished[-1].rstrip().startswith("training step 6/6")


def test_terminal_restored_after_error() -> None:
    class Fails(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("no")

    console = terminal()
    with pytest.raises(RuntimeError, match="no"):
        fit(console, module=Fails())
    assert "\x1b[?25h" in console.text


@pytest.mark.parametrize("make", [plain, terminal])
def test_validation_test_and_prediction(make: Callable[[], Paper]) -> None:
    console = make()
    trainer = LightningTrainer(
        callbacks=[ProgressBar(refresh_seconds=1e-6, line_seconds=1e-6, console=console)], devices=1, **QUIET
    )
    trainer.validate(Regression(), loader(8, 4), verbose=False)
    trainer.test(Regression(), loader(12, 4), verbose=False)
    trainer.predict(Regression(), loader(16, 4))
    for line in ("validation batch 2/2  val_loss", "test batch 3/3  val_loss", "prediction batch 4/4"):
        assert line in console.text


def test_sanity_check() -> None:
    assert fit(plain(), max_steps=1, num_sanity_val_steps=1).splitlines()[0] == "sanity check batch 1/1"


def test_print_from_module() -> None:
    class Talks(Regression):
        def on_train_epoch_end(self) -> None:
            self.print("[bold]half", "way")

    assert "[bold]half way" in fit(terminal(), module=Talks())


def test_disable_and_enable() -> None:
    console = plain()
    bar = ProgressBar(line_seconds=1e-6, console=console)
    bar.disable()
    assert not bar.is_enabled
    trainer = LightningTrainer(callbacks=[bar], max_steps=1, devices=1, **QUIET)
    trainer.fit(Regression(), loader(), loader())
    assert console.text == ""
    bar.enable()
    trainer.validate(Regression(), loader(), verbose=False)
    assert "validation batch 6/6" in console.text


def test_no_second_bar() -> None:
    trainer = LightningTrainer(callbacks=[bar := ProgressBar(console=plain())], devices=1, **QUIET)
    assert trainer.progress_bar_callback is bar


@pytest.mark.parametrize(
    ("callbacks", "is_shown", "kind"),
    [
        *((None, True, ProgressBar), (GlobalLoss(), None, ProgressBar)),
        *(([TQDMProgressBar()], True, TQDMProgressBar), (None, False, type(None))),
    ],
)
def test_the_trainer_shows_at_most_one_bar(callbacks: Any, is_shown: bool | None, kind: type) -> None:
    trainer = Trainer(callbacks=callbacks, devices=1, **{**QUIET, "enable_progress_bar": is_shown})
    assert type(trainer.progress_bar_callback) is kind
    assert sum(isinstance(each, LightningBar) for each in trainer.callbacks) == (is_shown is not False)


def of_ranks() -> str:
    return fit(plain(), kind=Trainer, strategy="ddp", max_steps=3)


def test_only_rank_zero_shows(ranks: Callable[..., list[Any]]) -> None:
    first, second = ranks(of_ranks, 2)
    assert "training step 3/3" in first
    assert second == ""


def test_overhead_per_step() -> None:
    """Of the hook only, with a margin for busy machines."""
    bar = ProgressBar(line_seconds=1000, console=plain())
    trainer = LightningTrainer(callbacks=[bar], max_steps=1, devices=1, **QUIET)
    bar.setup(trainer, Regression(), "fit")
    bar._open()
    bar._next = time.monotonic() + 1000
    calls, best = 10_000, float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for i in range(calls):
            bar.on_train_batch_end(trainer, trainer.lightning_module, None, None, i)
        best = min(best, (time.perf_counter() - begin) / calls)
    assert best < 5e-6


def test_total_steps() -> None:
    def total(**kwargs: Any) -> float:
        trainer = LightningTrainer(devices=1, callbacks=[ProgressBar(console=plain())], **kwargs, **QUIET)
        trainer.fit(Regression(), loader(24, 4))
        return total_steps(trainer)

    assert total(max_steps=3, max_epochs=9) == 3
    assert total(max_steps=100, max_epochs=2) == 12
    assert total(max_epochs=2, accumulate_grad_batches=4) == 4


def test_timer_excludes_first_step_and_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    timer = TrainingTimer()
    timer.start(10)
    now = 150.0  # slow first step
    assert timer.steps_per_second(11) is None
    now = 152.0
    assert timer.steps_per_second(15) == 2.0
    timer.pause()
    now = 200.0
    assert timer.steps_per_second(15) == 2.0
    timer.resume()
    now = 202.0
    assert timer.steps_per_second(19) == 2.0


def test_unknown_total() -> None:
    of_a_stream: Any = SimpleNamespace(max_steps=-1, max_epochs=2, num_training_batches=math.inf)
    assert total_steps(of_a_stream) == math.inf
    of_a_stream.max_steps = 7
    assert total_steps(of_a_stream) == 7
    console = terminal()
    bar = ProgressBar(console=console)
    bar._open()
    bar._show(State("training", 3, float("inf"), "step"))
    bar._stop()
    assert "3" in console.text
    assert "inf" not in console.text


def test_number_formats() -> None:
    assert [_short(v) for v in (0.5, 12.34, 4567.0, 1.2e6, 3e9)] == ["0.5", "12.3", "4.57k", "1.2M", "3G"]
    assert [_clock(v) for v in (-1, 9.6, 75, 3725)] == ["0:00", "0:10", "1:15", "1:02:05"]
