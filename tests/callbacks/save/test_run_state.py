import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from tests.callbacks.modules import QUIET as _QUIET
from tests.callbacks.modules import Regression, loader
from tests.parity.harness import world_size
from trainwright import Trainer
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.checkpoint.memory.replicas import Snapshot
from trainwright.checkpoint.read.find import list_checkpoints
from trainwright.checkpoint.read.run_state import RunState, holds_run_state
from trainwright.checkpoint.write import asynchronous as savers
from trainwright.checkpoint.write.interval import young_daly
from trainwright.checkpoint.write.save import write
from trainwright.core.errors import CheckpointError
from trainwright.strategies.contract.registry import make_strategy

QUIET = {name: value for name, value in _QUIET.items() if name != "enable_checkpointing"}


def make_trainer(*callbacks: Callback, strategy: str | None = None, plain: bool = False, **options: Any) -> Any:
    strategy = strategy or ("single" if world_size() == 1 else "ddp")
    options = {"max_epochs": 1, **QUIET, **options}
    kind, made = (LightningTrainer, make_strategy(strategy)) if plain else (Trainer, strategy)
    return kind(strategy=made, devices=world_size(), callbacks=list(callbacks), **options)


def steps_of(folder: Path | str) -> list[int]:
    return sorted(found.step for found in list_checkpoints(folder))


class Weights(Callback):
    """The head's weights after each step."""

    def __init__(self) -> None:
        self.at: dict[int, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        self.at[trainer.global_step] = pl_module.head.weight.detach().clone()


@pytest.mark.parametrize(("options", "expected"), [
    ({"every_n_steps": 2, "keep_last": 9}, [2, 4, 6]),
    ({"every_n_steps": 4, "keep_last": 9}, [4, 6]),
    ({"every_n_steps": 4, "keep_last": 9, "save_at_end": False}, [4]),
    ({"every_n_epochs": 1, "keep_last": 9}, [3, 6]),
    ({}, [6]),
    ({"every": None}, [6]),
    ({"every_n_seconds": 1e-6, "keep_last": 9}, [1, 2, 3, 4, 5, 6]),
    ({"every_n_steps": 1, "keep_every": 3}, [3, 6]),
    ({"every_n_steps": 1, "keep_every": 2, "keep_last": 2}, [2, 4, 5, 6]),
])  # fmt: skip
def test_save_schedules(tmp_path: Path, options: dict[str, Any], expected: list[int]) -> None:
    saver = RunStateCheckpoint(str(tmp_path / "c"), **options)
    make_trainer(saver, max_epochs=2).fit(Regression(), loader(12))
    assert steps_of(tmp_path / "c") == expected
    assert saver.last_model_path == str(tmp_path / f"c/step={expected[-1]}")
    assert saver.best_model_path == saver.last_model_path
    assert saver.best_model_score is None


def test_interval_from_measured_cost(tmp_path: Path) -> None:
    saver = RunStateCheckpoint(str(tmp_path), mtbf=1000.0)
    assert saver.interval_seconds == 60.0
    make_trainer(saver).fit(Regression(), loader(8))
    cost = saver._schedule._auto._cost  # type: ignore[union-attr]
    assert cost is not None
    assert cost > 0
    assert saver.interval_seconds == max(10.0, min(3600.0, young_daly(cost, 3.6e6)))


def test_default_folder_with_accumulation(tmp_path: Path) -> None:
    saver = RunStateCheckpoint(every_n_steps=1, keep_last=9)
    trainer = make_trainer(saver, default_root_dir=str(tmp_path), accumulate_grad_batches=3)
    assert trainer.checkpoint_callback is saver
    assert isinstance(saver, Checkpoint)  # Lightning's base class
    trainer.fit(Regression(), loader(36))
    assert steps_of(tmp_path / "checkpoints") == [1, 2, 3]
    assert saver.last_model_path == str(tmp_path / "checkpoints" / "step=3")
    assert RunState.open(saver.last_model_path).manifest.step == 3


def test_fast_dev_run_saves_nothing(tmp_path: Path) -> None:
    make_trainer(RunStateCheckpoint(str(tmp_path / "c")), fast_dev_run=True).fit(Regression(), loader(8), loader(8))
    assert not (tmp_path / "c").exists()


def test_filename_template(tmp_path: Path) -> None:
    name = "{epoch}-{step:03d}-{val_loss:.1f}-{unknown}"
    saver = RunStateCheckpoint(str(tmp_path), name, every_n_steps=2)
    make_trainer(saver, max_epochs=2).fit(Constant(), loader(12), loader(4))
    assert Path(saver.last_model_path).name == "1-006-2.0-nan"


class Constant(Regression):
    """Logs the given val_loss in each validation, then 2."""

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.values = list(losses)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.values.pop(0) if self.values else 2.0)


def test_keeps_best_and_last(tmp_path: Path) -> None:
    saver = RunStateCheckpoint(str(tmp_path), every_n_epochs=1, monitor="val_loss", keep_best=1)
    module = Constant(5.0, 3.0, 4.0, 3.5)
    make_trainer(saver, max_epochs=4).fit(module, loader(8), loader(4))
    assert steps_of(tmp_path) == [4, 8]
    assert saver.best_model_path == str(tmp_path / "step=4")
    assert saver.best_model_score == 3.0
    assert saver.last_model_path == str(tmp_path / "step=8")
    assert RunState.open(saver.best_model_path).about["metrics"]["val_loss"] == 3.0


def test_stale_metric_is_ignored(tmp_path: Path) -> None:
    best = {"monitor": "val_loss", "keep_best": 1}
    saver = RunStateCheckpoint(str(tmp_path), every_n_steps=1, keep_last=9, save_at_end=False, **best)
    make_trainer(saver, val_check_interval=2).fit(Constant(3.0, 1.0), loader(20), loader(4))
    metrics = {found.step: found.manifest.metric("val_loss") for found in list_checkpoints(tmp_path)}
    assert metrics == {1: None, 2: 3.0, 3: None, 4: 1.0, 5: None}
    assert saver.best_model_path == str(tmp_path / "step=4")


def test_mode_max(tmp_path: Path) -> None:
    saver = RunStateCheckpoint(str(tmp_path), every=None, monitor="val_loss", keep_best=2, mode="max")
    make_trainer(saver, max_epochs=4).fit(Constant(5.0, 3.0, float("nan"), 3.5), loader(4), loader(4))
    assert steps_of(tmp_path) == [1, 4]
    assert saver.best_model_score == 5.0


def test_monitor_training_metric(tmp_path: Path) -> None:
    class Logs(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss_of_epoch", loss, on_step=False, on_epoch=True)
            return loss

    saver = RunStateCheckpoint(str(tmp_path), every=None, monitor="loss_of_epoch", keep_best=1, save_at_end=False)
    make_trainer(saver, max_epochs=3).fit(Logs(), loader(8))
    assert steps_of(tmp_path) == [6]
    assert saver.best_model_score is not None


def test_unknown_monitor(tmp_path: Path) -> None:
    saver = RunStateCheckpoint(str(tmp_path), monitor="val_los", keep_best=1)
    with pytest.raises(ValueError, match="no such value was logged. Logged were: val_loss"):
        make_trainer(saver, max_epochs=3).fit(Regression(), loader(8), loader(4))


def test_foreign_checkpoints_are_kept(tmp_path: Path) -> None:
    class SaveOwn(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(str(tmp_path / "mine"))

    make_trainer(SaveOwn(), RunStateCheckpoint(str(tmp_path), every_n_steps=1)).fit(Regression(), loader(12))
    assert steps_of(tmp_path) == [3]
    assert holds_run_state(str(tmp_path / "mine"))


def test_unwritable_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    seen = Weights()
    with pytest.raises(CheckpointError, match=f"not allowed to write in {tmp_path}, .*checkpoint.*dirpath"):
        make_trainer(seen, RunStateCheckpoint(str(tmp_path / "new"))).fit(Regression(), loader(12))
    assert not seen.at


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resume_exactly(tmp_path: Path, asynchronous: bool) -> None:
    whole, first, second = Weights(), Weights(), Weights()
    make_trainer(whole, max_epochs=2).fit(Regression(), loader(12))
    saver = RunStateCheckpoint(str(tmp_path), every_n_steps=2, keep_last=9, asynchronous=asynchronous)
    make_trainer(first, saver, max_steps=5, max_epochs=2).fit(Regression(), loader(12))
    resumed = RunStateCheckpoint(str(tmp_path), every_n_steps=2, keep_last=9, asynchronous=asynchronous)
    with pytest.warns(UserWarning, match=r"holds checkpoints of later steps than 4.*step=5"):
        make_trainer(second, resumed, max_epochs=2).fit(Regression(), loader(12), ckpt_path=str(tmp_path / "step=4"))
    assert sorted(second.at) == [5, 6]
    assert torch.equal(second.at[6], whole.at[6])
    assert resumed.last_model_path == str(tmp_path / "step=6")


def test_best_survives_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every_n_epochs": 1, "monitor": "val_loss", "keep_best": 1}
    first = make_trainer(RunStateCheckpoint(str(tmp_path), **options), max_epochs=2)
    first.fit(Constant(3.0, 4.0), loader(8), loader(4))
    saver = RunStateCheckpoint(str(tmp_path), **options)
    make_trainer(saver, max_epochs=4).fit(Constant(3.5, 3.2), loader(8), loader(4), ckpt_path=str(tmp_path / "step=4"))
    assert saver.best_model_path == str(tmp_path / "step=2")
    assert steps_of(tmp_path) == [2, 8]


def test_best_and_last_by_name(tmp_path: Path) -> None:
    saver = RunStateCheckpoint(str(tmp_path), every_n_epochs=1, monitor="val_loss", keep_best=1)
    seen = Weights()
    module = Constant(3.0, 4.0)
    trainer = make_trainer(seen, saver, max_epochs=2)
    trainer.fit(module, loader(8), loader(4))
    trainer.test(module, loader(4), ckpt_path="best", verbose=False)
    assert torch.equal(module.head.weight, seen.at[2])
    assert not torch.equal(seen.at[2], seen.at[4])
    assert saver.last_model_path == str(tmp_path / "step=4")  # testing an older one does not change it


def test_save_weights_only(tmp_path: Path) -> None:
    saver = RunStateCheckpoint(str(tmp_path), save_weights_only=True)
    make_trainer(saver).fit(Regression(), loader(8))
    state = RunState.open(saver.last_model_path)
    assert state.about["kind"] == "weights"
    assert all(key.startswith("weights/") for key in state.keys())  # noqa: SIM118


def train_on_ranks(folder: str, options: dict[str, Any], strategy: str, plain: bool) -> tuple[str, str, list[int]]:
    saver, seen = RunStateCheckpoint(folder, **options), Weights()
    trainer = make_trainer(seen, saver, strategy=strategy, plain=plain, max_epochs=2)
    module = Constant(3.0, 4.0)
    trainer.fit(module, loader(24), loader(4))
    state = RunState.open(saver.best_model_path)
    key = next(key for key in state.keys() if key.endswith("head.weight"))  # noqa: SIM118
    if strategy == "ddp":
        assert torch.equal(state.read(key), seen.at[state.manifest.step])
    return saver.best_model_path, saver.last_model_path, steps_of(folder)


@pytest.mark.sample(3)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("strategy", "plain"), [("ddp", False), ("zero3", False), ("ddp", True)])
def test_ranks_decide_together(ranks, tmp_path: Path, strategy: str, plain: bool, asynchronous: bool) -> None:
    options = {"every_n_steps": 2, "monitor": "val_loss", "keep_best": 1, "asynchronous": asynchronous}
    outcomes = ranks(train_on_ranks, 2, str(tmp_path), options, strategy, plain)
    assert outcomes[0] == outcomes[1] == (str(tmp_path / "step=3"), str(tmp_path / "step=6"), [3, 6])


class Hurried(Callback):
    """Steps of different length on every rank."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        time.sleep(0.002 * (1 + 4 * trainer.global_rank))


def save_by_the_clock(folder: str, asynchronous: bool) -> list[int]:
    steps: list[int] = []

    class Notes(RunStateCheckpoint):
        def _save(self, trainer: Any) -> Any:
            steps.append(trainer.global_step)
            return super()._save(trainer)

    saver = Notes(folder, every_n_seconds=0.05, asynchronous=asynchronous)
    make_trainer(Hurried(), saver, max_epochs=20).fit(Regression(), loader(24))
    return steps


@pytest.mark.sample(1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_save_by_one_clock(ranks, tmp_path: Path, asynchronous: bool) -> None:
    steps = ranks(save_by_the_clock, 2, str(tmp_path), asynchronous)
    assert steps[0] == steps[1]
    assert 3 <= len(steps[0]) < 60


class HoldsBack(Callback):
    """Delays the writing of checkpoints until a later step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int = -1) -> None:
        self.go = threading.Event()
        self.until = until

        def held(*args: Any) -> Any:
            assert self.go.wait(60)
            return write(*args)

        monkeypatch.setattr(savers, "write", held)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.until:
            self.go.set()


def test_asynchronous_save_has_values_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holds, seen = HoldsBack(monkeypatch, until=6), Weights()
    saver = RunStateCheckpoint(str(tmp_path), every_n_steps=4, save_at_end=False, asynchronous=True)
    make_trainer(seen, holds, saver).fit(Regression(), loader(24))
    state = RunState.open(saver.last_model_path)
    assert state.manifest.step == 4
    assert torch.equal(state.read("weights/head.weight"), seen.at[4])
    assert not torch.equal(seen.at[4], seen.at[6])


class Fails(Exception):
    pass


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_on_error(tmp_path, monkeypatch, asynchronous, on_error):
    def fail(*args: Any) -> Any:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(savers, "write", fail)
    seen = Weights()
    saver = RunStateCheckpoint(str(tmp_path), every_n_steps=2, asynchronous=asynchronous, on_error=on_error)
    expected: Any = pytest.raises(CheckpointError, match="the disk is full")
    if on_error == "warn":
        expected = pytest.warns(UserWarning, match=r"the disk is full \(Training continues without it")
    with expected:
        make_trainer(seen, saver).fit(Regression(), loader(24))
    assert max(seen.at) in ((6,) if on_error == "warn" else (2, 3, 4))
    assert saver.last_model_path == ""


def fail_on_one_rank(folder: str) -> tuple[str, list[int]]:
    def fail(content: Any, path: str, group: Any) -> Any:
        if dist.get_rank() == 1:
            key = f"rank/{dist.get_rank()}/torch"
            assert key in content.tensors, list(content.tensors)
            content.tensors[key].parts[0] = ((0,), None)
        return write(content, path, group)

    seen, saver = Weights(), RunStateCheckpoint(folder, every_n_steps=2, asynchronous=True)
    failing = patch.object(savers, "write", fail)
    with failing, pytest.raises(CheckpointError) as error:
        make_trainer(seen, saver, max_epochs=50).fit(Regression(), loader(24))
    return str(error.value), sorted(seen.at)


def test_error_of_one_rank_stops_all(ranks, tmp_path: Path) -> None:
    (first, steps), (second, other_steps) = ranks(fail_on_one_rank, 2, str(tmp_path))
    assert "rank 1" in first
    assert first == second
    assert steps == other_steps
    assert len(steps) < 150
    assert not list(tmp_path.iterdir())


class Breaks(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.at:
            raise Fails


def test_exception_waits_for_pending_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holds = HoldsBack(monkeypatch)
    saver = RunStateCheckpoint(str(tmp_path), every_n_steps=2, asynchronous=True)
    threading.Timer(0.3, holds.go.set).start()
    with pytest.raises(Fails):
        make_trainer(Breaks(3), saver).fit(Regression(), loader(24))
    assert saver.last_model_path == str(tmp_path / "step=2")
    assert RunState.open(saver.last_model_path).manifest.step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step=2"]


class ToldToEnd(Callback):
    """One rank gets SIGTERM while a checkpoint is being written."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3 and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)


def end_by_signal(folder: str) -> tuple[str, list[str]]:
    started = threading.Event()

    def slow(*args: Any) -> Any:
        started.wait(0.2)  # never set: training continues meanwhile
        return write(*args)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else Lightning would keep the handler of the pool
    saver = RunStateCheckpoint(folder, every_n_steps=20, asynchronous=True)
    slowly = patch.object(savers, "write", slow)
    with slowly, pytest.raises(SystemExit):  # raised by the signal
        make_trainer(ToldToEnd(), saver).fit(Regression(), loader(1600))
    return saver.last_model_path, sorted(os.listdir(folder))


def test_signal_waits_for_pending_save(ranks, tmp_path: Path) -> None:
    (path, files), other = ranks(end_by_signal, 2, str(tmp_path))
    assert (path, files) == other
    assert files == [Path(path).name]
    assert RunState.open(path).manifest.step == int(path.rpartition("=")[2])


def test_hanging_writer_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.callbacks.save.run_state._PATIENCE", 0.1)
    holds = HoldsBack(monkeypatch)
    saver = RunStateCheckpoint(str(tmp_path), every_n_steps=2, asynchronous=True)
    with pytest.warns(UserWarning, match="was not finished within 0 s and is abandoned"), pytest.raises(Fails):
        make_trainer(Breaks(3), saver).fit(Regression(), loader(24))
    holds.go.set()


def copy_in_memory(folder: str) -> tuple[list[int], bool]:
    saver, seen = RunStateCheckpoint(folder, in_memory_every_n_steps=2), Weights()
    module = Regression()
    make_trainer(seen, saver).fit(module, loader(40))
    assert saver.copies is not None
    held = saver.copies.restore(have=world_size() == 1 or dist.get_rank() != 0)
    assert isinstance(held, Snapshot)
    weight = held.content.tensors["weights/head.weight"].part_at(None)
    return saver.copies.steps(), torch.equal(weight, seen.at[held.step])


def test_copies_in_memory(ranks, tmp_path: Path) -> None:
    assert ranks(copy_in_memory, 2, str(tmp_path)) == [([4, 2], True)] * 2


@pytest.mark.parametrize(("options", "said"), [
    ({"every_n_steps": 0}, "every_n_steps=0"),
    ({"every_n_steps": True}, "every_n_steps=True"),
    ({"every_n_seconds": -1}, "every_n_seconds=-1"),
    ({"every": "often"}, "every='often'"),
    ({"keep_last": 0}, "keep_last=0"),
    ({"keep_best": -1}, "keep_best=-1"),
    ({"mode": "least"}, "mode='least'"),
    ({"mtbf": 0}, "mtbf=0"),
    ({"on_error": "ignore"}, "on_error='ignore'"),
    ({"keep_best": 1}, "keep_best=1 without monitor"),
    ({"monitor": "val_loss"}, "monitor='val_loss' with keep_best=0"),
    ({"filename": "last", "keep_last": 2}, "filename='last' without {step}"),
    ({"filename": "a/{step}"}, "filename='a/{step}'"),
    ({"filename": ".{step}"}, "not starting with a dot"),
    ({"filename": ""}, "filename=''"),
    ({"filename": "{step"}, "filename='{step'"),
    ({"filename": "{}"}, "a field has no name"),
    ({"filename": "{val_loss:d}"}, "filename='{val_loss:d}'"),
    ({"every": None, "save_at_end": False}, "nothing says when to save"),
    ({"in_memory_every_n_steps": 1, "save_weights_only": True}, "weights alone"),
])  # fmt: skip
def test_options_out_of_range(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="RunStateCheckpoint") as error:
        RunStateCheckpoint(**options)
    assert said in str(error.value)


def test_all_problems_in_one_error() -> None:
    with pytest.raises(ValueError, match=r"every_n_steps=0.*keep_last=0.*filename"):
        RunStateCheckpoint(every_n_steps=0, keep_last=0, filename="/")


def test_checkpoint_io_plugin(tmp_path: Path) -> None:
    trainer = make_trainer(RunStateCheckpoint(str(tmp_path)), plugins=[TorchCheckpointIO()])
    with pytest.raises(ValueError, match="CheckpointIO plugin"):
        trainer.fit(Regression(), loader(8))


def test_two_callbacks_with_one_folder(tmp_path: Path) -> None:
    savers = [RunStateCheckpoint(str(tmp_path)), RunStateCheckpoint(str(tmp_path), filename="{step}")]
    with pytest.raises(ValueError, match="Two RunStateCheckpoint callbacks save into"):
        make_trainer(*savers).fit(Regression(), loader(8))


HALF = """
import os, sys
from trainwright.checkpoint.store.storage import PendingFolder
pending = PendingFolder.create(sys.argv[1] + "/step=7")
pending.write_file("state.json", b"{}", rank=0)
os.kill(os.getpid(), 9)
"""


def train_shortly(folder: str) -> list[str]:
    make_trainer(RunStateCheckpoint(folder)).fit(Regression(), loader(8))
    return sorted(os.listdir(folder))


def test_stale_partial_saves_are_removed(ranks, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", HALF, str(tmp_path)], check=False)
    assert len(os.listdir(tmp_path)) == 1
    assert ranks(train_shortly, 2, str(tmp_path)) == [["step=1"]] * 2
