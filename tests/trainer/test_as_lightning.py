"""Behaviour of Lightning's Trainer that scripts rely on."""

import multiprocessing
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import pytest
import torch
import torch.multiprocessing as mp
from lightning.fabric.accelerators.mps import MPSAccelerator
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from trainwright import RunStateCheckpoint, Trainer
from trainwright.checkpoint.read.run_state import RunState, materialised
from trainwright.command import run
from trainwright.command.schema.compose import compose_checked
from trainwright.core.errors import CheckpointError
from trainwright.strategies.contract import gradients
from trainwright.strategies.contract.gradients import widest
from trainwright.strategies.data.ddp import DDPStrategy
from trainwright.strategies.data.single import SingleDeviceStrategy
from trainwright.strategies.pipeline.tracing import sample_functions
from trainwright.trainer.loop import loss_weighting


def trainer_of(**kwargs: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(**{**quiet, "enable_checkpointing": False, "devices": 1, "max_steps": 3, **kwargs})


class Module(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.log("train_loss", result["loss"])
        return result

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def test_best_model_file_is_loadable(tmp_path):
    saver = ModelCheckpoint(tmp_path, monitor="train_loss", save_last=True)
    trainer, module = trainer_of(callbacks=[saver], enable_checkpointing=True), Module()
    trainer.fit(module)
    best = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    assert Path(best).is_file()
    assert torch.equal(torch.load(best)["state_dict"]["layer.weight"], module.layer.weight)
    assert torch.equal(Module.load_from_checkpoint(best).layer.weight, module.layer.weight)
    theirs = pl.Trainer(accelerator="cpu", max_steps=5, logger=False, enable_checkpointing=False)
    theirs.fit(Module(), ckpt_path=best)
    assert theirs.global_step == 5


def test_arguments_from_environment(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "7")
    monkeypatch.setenv("PL_TRAINER_STRATEGY", "DDP")
    monkeypatch.setenv("PL_TRAINER_GLOBAL_BATCH_SIZE", "8")
    trainer = Trainer(accelerator="cpu", devices=1, logger=False)
    assert (trainer.max_steps, trainer.global_batch_size) == (7, 8)
    assert isinstance(trainer.strategy, DDPStrategy)
    assert Trainer(accelerator="cpu", devices=1, logger=False, max_steps=42).max_steps == 42


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)


class Late(Module):
    """Creates its parameters in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        del self.layer

    def configure_model(self) -> None:
        if not hasattr(self, "layer"):
            self.layer = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", [None, "zero3", "pipeline", "diloco", "parameter_server"])
def test_notebook_forks(notebook: None, tmp_path: Path, strategy: str | None) -> None:
    """The parent has used several threads before, and gets the trained weights under each layout."""
    torch.set_num_threads(2)
    before = {**os.environ}
    module = Late()
    ones = torch.ones(300, 300)
    (ones @ ones).exp_()
    saver = ModelCheckpoint(tmp_path, save_last=True)
    kwargs = {} if strategy is None else {"strategy": strategy}
    trainer_of(devices=2, callbacks=[saver], enable_checkpointing=True, **kwargs).fit(module)
    saved = materialised(RunState.open(saver.last_model_path or str(next(tmp_path.glob("last*")))).tree)
    for name, value in module.state_dict().items():
        assert torch.equal(saved["state_dict"][name], value), name
    assert trainer_of(devices=2, **kwargs).validate(module, verbose=False)
    assert dict(os.environ) == before
    assert not list(Path(tempfile.gettempdir()).glob("trainwright-*/weights"))


def test_notebook_knows_the_run_states_of_its_ranks(notebook: None, tmp_path: Path) -> None:
    saver = RunStateCheckpoint(str(tmp_path / "states"))
    trainer_of(devices=1, strategy="zero3", callbacks=[saver], enable_checkpointing=True).fit(Module())
    assert saver.last_model_path == saver.best_model_path == str(tmp_path / "states/step=3")


class Logging(Module):
    """Logs more than one pipe holds."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({f"value_{index}": float(index) for index in range(150)})
        self.log("shown", 1.0, prog_bar=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().validation_step(batch, batch_idx)["x"], sync_dist=True)


@pytest.mark.parametrize(
    ("strategy", "saver"),
    [
        ("zero3", RunStateCheckpoint("states", monitor="val_loss", keep_best=1)),
        (None, ModelCheckpoint(monitor="val_loss", save_last=True)),  # finds its folder in the ranks
        ("parameter_server", RunStateCheckpoint("states")),
    ],
)
def test_trainer_in_notebook_continues_after_its_ranks(notebook: None, strategy: str | None, saver: Any) -> None:
    kwargs = {} if strategy is None else {"strategy": strategy}
    limits = {"max_epochs": 2, "max_steps": -1, "limit_train_batches": 3, "limit_val_batches": 2}
    trainer = trainer_of(devices=2, callbacks=[saver], enable_checkpointing=True, **limits, **kwargs)
    module = Logging()
    trainer.fit(module)
    assert (trainer.global_step, trainer.current_epoch) == (6, 2)
    for metrics in (trainer.callback_metrics, trainer.logged_metrics):
        assert metrics["value_149"] == 149
        assert "val_loss" in metrics
    assert trainer.progress_bar_metrics == {"shown": 1.0}
    assert Path(saver.best_model_path).exists()
    assert Path(saver.last_model_path).exists()
    if saver.monitor is not None:
        assert saver.best_model_score is not None
        [best] = trainer.validate(ckpt_path="best", verbose=False)
        assert best["val_loss"] == pytest.approx(saver.best_model_score.item())
    assert trainer.test(verbose=False) == [{}]
    with pytest.warns(UserWarning, match=r"ranks have ended.*holds the weights.*fit\(ckpt_path='last'\)"):
        trainer.save_checkpoint("saved.ckpt")
    saved = torch.load("saved.ckpt")
    assert (saved["global_step"], saved["epoch"]) == (6, 2)
    for name, value in module.state_dict().items():
        assert torch.equal(saved["state_dict"][name], value), name
    assert trainer.validate(ckpt_path="saved.ckpt", verbose=False)[0].keys() == {"val_loss"}
    with pytest.raises(Exception, match="contains only the model"):
        trainer_of(devices=1, max_steps=9).fit(Logging(), ckpt_path="saved.ckpt")


def test_lists_of_hydra() -> None:
    given = {"_target_": "trainwright.Trainer", "accelerator": "cpu", "devices": [0], "enable_progress_bar": False}
    stop, logger = EarlyStopping("loss"), CSVLogger("logs")
    config = OmegaConf.create(given)
    trainer = hydra.utils.instantiate(config, callbacks=[stop], logger=[logger], devices=1)
    assert stop in trainer.callbacks
    assert trainer.loggers == [logger]


def test_objects_of_the_other_package_are_refused() -> None:
    class Returns(Module):
        def __init__(self, loader: Any) -> None:
            super().__init__()
            self.loader = loader

        def train_dataloader(self) -> Any:
            return self.loader

    other = type("Net", (), {"__module__": "pytorch_lightning.core"})
    theirs: Any = type("Mine", (other,), {"__iter__": lambda self: iter(())})()
    trainer = trainer_of()
    for wrong in (
        lambda: trainer.fit(theirs),
        lambda: trainer.fit(Module(), datamodule=theirs),
        lambda: trainer.validate(model=theirs),
        lambda: trainer_of(callbacks=[theirs]),
        lambda: trainer_of(strategy=theirs),
        lambda: trainer.fit(Module(), {"a": theirs}),
        lambda: trainer.fit(Returns(theirs)),
    ):
        with pytest.raises(
            TypeError, match=r"Mine is of the package pytorch_lightning.* type lightning.pytorch .*_alias"
        ):
            wrong()


def test_notebook_fork_error(notebook: None) -> None:
    class Raises(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1:
                raise ValueError("this batch is bad")
            return super().training_step(batch, batch_idx)

    before = set(multiprocessing.active_children())
    with pytest.raises(mp.ProcessRaisedException, match="this batch is bad"):
        trainer_of(devices=2).fit(Raises())
    assert set(multiprocessing.active_children()) == before
    with pytest.raises(MisconfigurationException, match=r"num_nodes=2.*Set num_nodes=1"):
        trainer_of(devices=2, num_nodes=2)


def test_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Used by ``single``; strategies with collectives train on the CPU if the accelerator is ``auto``."""
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    for kwargs in ({}, {"strategy": "single"}, {"accelerator": "mps"}, {"accelerator": "gpu"}, {"devices": "auto"}):
        trainer = trainer_of(**{"accelerator": "auto", **kwargs})
        assert isinstance(trainer.strategy, SingleDeviceStrategy)
        assert trainer.strategy.root_device == torch.device("mps", 0)
    for kwargs in ({"devices": 2}, {"strategy": "zero3"}, {"strategy": DDPStrategy()}):
        assert trainer_of(**{"accelerator": "auto", **kwargs}).strategy.root_device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"accelerator='mps' with ZeroStrategy.*accelerator='cpu'"):
        trainer_of(accelerator="mps", strategy="zero3")
    monkeypatch.undo()
    assert "no Apple GPU" in problem_of("accelerator=mps")
    assert "type strategy=single devices=1, or accelerator=cpu" in problem_of("strategy=ddp", "accelerator=mps")


def problem_of(*words: str) -> str:
    cfg = compose_checked(["recipe=digits", *words]).cfg
    assert cfg is not None
    return run.plan(cfg, "fit", None)[1][0]


class Narrow(TorchDispatchMode):
    """Refuses float64, as an Apple GPU does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float64:
            raise TypeError(f"{func}: no float64 here")
        return found


def test_apple_gpu_sums_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients, loss_weighting, sample_functions):
        monkeypatch.setattr(module, "widest", lambda device: widest(torch.device("mps")))
    strategy, norms = SingleDeviceStrategy(), []

    class Classifier(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.layer(batch), torch.tensor([batch_idx % 2]))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(strategy.squares_by_block(self.named_parameters()))

    with Narrow():
        trainer_of(strategy=strategy, loss_weighting="tokens", accumulate_grad_batches=2).fit(Classifier())
    assert len(norms) == 3
    assert all(each.dtype == torch.float32 for each in norms)


class Without(BoringModel):
    def configure_optimizers(self) -> None:
        return None


def test_no_optimizer(tmp_path):
    trainer = trainer_of()
    trainer.fit(Without())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer_of(max_steps=5).fit(Without(), ckpt_path=tmp_path / "x.ckpt")


class Loads(BoringModel):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.loaded_with = strict
        return super().load_state_dict(state_dict, strict, assign)


@pytest.mark.parametrize("strict", [True, False])
def test_strict_loading(tmp_path, strict):
    trainer = trainer_of()
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    module = Loads()
    module.strict_loading = strict
    trainer_of(max_steps=4).fit(module, ckpt_path=tmp_path / "x.ckpt")
    assert module.loaded_with == strict


def test_no_thread_left():
    before = set(threading.enumerate())
    trainer_of().fit(BoringModel())
    assert set(threading.enumerate()) <= before


def test_empty_loader():
    empty = DataLoader(RandomDataset(32, 0))
    trainer = trainer_of(max_steps=-1, max_epochs=1)
    with pytest.warns(UserWarning, match="across ranks is zero"):
        trainer.fit(BoringModel(), empty)
    assert trainer.global_step == 0


def test_no_such_checkpoint():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt") as error:
        trainer_of().fit(BoringModel(), ckpt_path="nowhere.ckpt")
    assert isinstance(error.value, CheckpointError)


class KeepsItsStep(BoringModel):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Does not call the closure."""


def test_step_without_closure():
    with pytest.raises(MisconfigurationException, match="closure hasn't been executed"):
        trainer_of().fit(KeepsItsStep())


class Picky(DataLoader[Any]):
    """Cannot be re-created: its arguments differ from a DataLoader's."""

    def __init__(self, length: int) -> None:
        super().__init__(RandomDataset(32, length), batch_size=2, shuffle=True)


def test_loaders_stay_the_same_objects(tmp_path):
    train, val = Picky(12), DataLoader(RandomDataset(32, 4))
    own = train.batch_sampler
    trainer = trainer_of(max_steps=8, max_epochs=2)
    trainer.fit(BoringModel(), train, val)
    assert trainer.train_dataloader is train
    assert trainer.val_dataloaders is val
    assert train.batch_sampler is own
    assert not hasattr(train, "state_dict")
    trainer.save_checkpoint(tmp_path / "x.ckpt")  # with the position in a loader that was restored
    cursor = torch.load(tmp_path / "x.ckpt")["loops"]["fit_loop"]["state_dict"]["cursor"]
    assert cursor["loaders"][0]["kind"] == "samples"


class Remembers(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(float(batch[0, 0]))
        return super().training_step(batch, batch_idx)


def test_shared_loader(tmp_path):
    """A shared loader for training and evaluation gives the batches of separate ones, also when resumed."""
    data = RandomDataset(32, 6)
    loader = DataLoader(data)
    whole, begun, resumed = Remembers(), Remembers(), Remembers()
    trainer_of(max_steps=12, max_epochs=2).fit(whole, loader, DataLoader(data))
    trainer = trainer_of(max_steps=3)
    trainer.fit(begun, loader, loader)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer.validate(begun, loader, verbose=False)
    trainer_of(max_steps=12, max_epochs=2).fit(resumed, loader, loader, ckpt_path=tmp_path / "x.ckpt")
    assert len(whole.seen) == 12
    assert begun.seen + resumed.seen == whole.seen


def test_batch_sampler_order_and_last_batch():
    data = RandomDataset(32, 7)
    numbers = {float(sample[0]): number for number, sample in enumerate(data)}  # type: ignore[arg-type]
    module = Remembers()
    batches = BatchSampler(RandomSampler(data), 1, drop_last=False)
    trainer_of(max_steps=-1, max_epochs=2).fit(module, DataLoader(data, batch_sampler=batches), DataLoader(data))
    seen = [numbers[each] for each in module.seen]
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7))
    assert seen[:7] != seen[7:]
    module = Remembers()
    batches = BatchSampler(RandomSampler(data), 2, drop_last=True)
    trainer_of(max_steps=-1, max_epochs=1).fit(module, DataLoader(data, batch_sampler=batches), DataLoader(data))
    assert len(module.seen) == 3


class Announced(RandomSampler):
    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


@pytest.mark.parametrize("seed_samples", [False, True])  # the loader as it is, and a copy
def test_set_epoch_of_samplers(seed_samples):
    data = RandomDataset(32, 2)
    sampler = Announced(data)
    trainer_of(max_epochs=3, max_steps=-1, seed_samples=seed_samples).fit(
        BoringModel(), DataLoader(data, sampler=sampler), DataLoader(data)
    )
    assert list(dict.fromkeys(sampler.epochs)) == [0, 1, 2]
