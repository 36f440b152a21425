"""Phases announced by the loop."""

from typing import Any

from lightning.pytorch import Callback

from tests.callbacks.modules import Regression, loader
from tests.parity.harness import make_trainer
from trainwright.core.run.phases import Phases


def _announced(**options: Any) -> list[str]:
    trainer = make_trainer("single", max_steps=2, **options)
    announced: list[str] = []
    trainer.phases.listen(announced.append)
    trainer.fit(Regression(), loader(16), loader(16))
    return announced


def test_phases_of_a_step():
    announced = _announced(limit_val_batches=0)
    step = ["data", "hooks", "forward", "backward", "optimizer", "hooks"]
    assert announced == [*step, *step, "idle"]
    # Validation is announced.
    announced = _announced(val_check_interval=2)
    assert announced.count("validation") == 1
    assert announced.index("validation") > announced.index("optimizer", announced.index("optimizer") + 1)
    assert announced[-1] == "idle"


def test_listeners_unsubscribe():
    phases, heard = Phases(), []
    end = phases.listen(lambda phase: heard.append(("first", phase)))
    phases.listen(lambda phase: heard.append(("second", phase)))
    phases.begin("data")
    end()
    phases.begin("forward")
    assert heard == [("first", "data"), ("second", "data"), ("second", "forward")]


class SavesAtTheSecondStep(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint("saved.ckpt")


def test_saving_interrupts_a_phase():
    announced = _announced(limit_val_batches=0, callbacks=[SavesAtTheSecondStep()])
    assert announced[-4:] == ["hooks", "saving", "hooks", "idle"]
