"""`ckpt_path="last"` and `"auto"`: all ranks resume the newest good checkpoint."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.harness import QUIET, world_size
from tests.tools.checkpoints import RANK_FILE, cut_short, flip_bit, write_checkpoint
from trainwright import RunStateCheckpoint, Trainer
from trainwright.checkpoint.format.tensor_file import bytes_of
from trainwright.core.errors import CheckpointError
from trainwright.trainer.resume import search_folders

STRATEGIES = [("single", 1), ("ddp", 2), ("zero3", 2)]
LAST, AUTO = "last", "auto"


class Small(pl.LightningModule):
    """Records the step at which training starts."""

    began = -1

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.began < 0:
            self.began = self.trainer.global_step
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("norm", self.layer.weight.norm())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.1)


def trainer_of(strategy: str, folder: Path, max_steps: int, **options: Any) -> Trainer:
    saver = RunStateCheckpoint(str(folder), every_n_steps=1, keep_last=10)
    given = {**QUIET, "enable_checkpointing": True, "callbacks": [saver], **options}
    return Trainer(strategy=strategy, devices=world_size(), max_steps=max_steps, max_epochs=-1, **given)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(64.0).view(16, 4)), batch_size=2)


def fit(strategy: str, folder: Path, max_steps: int, ckpt_path: str | None = None) -> dict[str, Any]:
    """Train; return the first step, the resumed path, the warnings and the error."""
    module, trainer = Small(), trainer_of(strategy, folder, max_steps)
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader(), ckpt_path=ckpt_path)
        except CheckpointError as raised:
            error = f"{type(raised).__name__}: {raised}"
    warned = [str(each.message) for each in caught if str(each.message).startswith("ckpt_path=")]
    return {"began": module.began, "from": trainer.ckpt_path, "warned": warned, "error": error}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("strategy", "count"), STRATEGIES)
@pytest.mark.parametrize("word", [LAST, AUTO])
def test_newest_good_checkpoint(ranks, tmp_path, strategy, count, word):
    ranks(fit, count, strategy, tmp_path, 4)
    flip_bit(tmp_path / "step=4", f"rank_{count - 1:05d}.safetensors")
    cut_short(tmp_path / "step=3", "state.json")
    results = ranks(fit, count, strategy, tmp_path, 5, word)
    assert [result["began"] for result in results] == [2] * count
    assert {result["from"] for result in results} == {str(tmp_path / "step=2")}
    damaged, truncated, went_on = results[0]["warned"]
    assert f"step=4: rank_{count - 1:05d}.safetensors (written by rank {count - 1}): changed content" in damaged
    assert "step=3: state.json (written by rank 0): truncated" in truncated
    assert f"resuming {tmp_path / 'step=2'}" in went_on


@pytest.mark.parametrize("count", [1, 2])
def test_no_good_checkpoint(ranks, tmp_path, count):
    strategy = "single" if count == 1 else "ddp"
    ranks(fit, count, strategy, tmp_path, 2)
    for step in (1, 2):
        flip_bit(tmp_path / f"step={step}", "tensors.json", at=9)
    for result in ranks(fit, count, strategy, tmp_path, 3, LAST):
        assert result["began"] == -1
        assert "there is no good checkpoint; skipped" in result["error"]
        assert "tensors.json (written by rank 0)" in result["error"]
    results = ranks(fit, count, strategy, tmp_path, 3, AUTO)
    assert [result["began"] for result in results] == [0] * count
    assert "starting from scratch" in results[0]["warned"][-1]
    assert {result["from"] for result in results} == {None}


@pytest.mark.parametrize("word", [LAST, AUTO])
def test_no_checkpoint(ranks, tmp_path, word):
    [result] = ranks(fit, 1, "single", tmp_path, 1, word)
    assert result["began"] == 0
    # As in Lightning, "last" without a checkpoint is a warning; with "auto" it is normal.
    assert len(result["warned"]) == (word == LAST)


@pytest.mark.parametrize(("strategy", "count"), STRATEGIES)
def test_explicit_path_is_not_replaced(ranks, tmp_path, strategy, count):
    ranks(fit, count, strategy, tmp_path, 2)
    flip_bit(tmp_path / "step=2")
    for result in ranks(fit, count, strategy, tmp_path, 3, str(tmp_path / "step=2")):
        assert result["error"].startswith("DamagedCheckpoint")
        assert f"{RANK_FILE} (written by rank 0)" in result["error"]
        assert result["began"] == -1


def test_weights_only_is_not_resumed(tmp_path):
    fit("single", tmp_path, 1)
    write_checkpoint(tmp_path / "weights", 5, kind="weights")
    result = fit("single", tmp_path, 2, AUTO)
    assert result["began"] == 1
    assert "holds weights alone" in result["warned"][0]


def test_validate_last(tmp_path):
    fit("single", tmp_path, 3)
    norms = []
    for path in (str(tmp_path / "step=2"), LAST):
        trainer = trainer_of("single", tmp_path, 1)
        norms.append(trainer.validate(Small(), loader(), ckpt_path=path, verbose=False)[0]["norm"])
        flip_bit(tmp_path / "step=3")  # the last good one is then the one measured first
    assert norms[0] == norms[1]


def test_search_folders(tmp_path):
    fit("single", tmp_path / "old", 3)
    fit("single", tmp_path / "older", 6)
    module, trainer = Small(), trainer_of("single", tmp_path / "new", 4)
    search_folders(trainer, [str(tmp_path / "empty"), str(tmp_path / "old"), str(tmp_path / "older")])
    trainer.fit(module, loader(), ckpt_path=LAST)
    assert module.began == 3
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"step=4"}


def test_lightning_model_checkpoint(tmp_path):
    """A damaged or truncated file of Lightning's callback is found."""
    saver = ModelCheckpoint(str(tmp_path), "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
    trained = Small()
    trainer_of("single", tmp_path, 3, callbacks=[saver]).fit(trained, loader())
    data = (tmp_path / "last.ckpt").read_bytes()
    at = data.index(bytes(bytes_of(trained.layer.weight.detach())))
    flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    for damaged, what in ((flipped, r"data\.\d+ .*changed"), (data[:-9], "is truncated")):
        (tmp_path / "last.ckpt").write_bytes(damaged)
        saver = ModelCheckpoint(str(tmp_path), save_last=True)
        module, trainer = Small(), trainer_of("single", tmp_path, 4, callbacks=[saver])
        with pytest.raises(CheckpointError, match=rf"no good checkpoint.*\n.*last.ckpt: .*{what}"):
            trainer.fit(module, loader(), ckpt_path=LAST)
        assert module.began == -1


def fit_from_weights(folder: Path, strategy: str, word: str | None) -> tuple[int, float]:
    """Initialize from the weights in ``folder/weights``; return the first step and the norm there."""
    torch.manual_seed(5)
    module, trainer = Small(), trainer_of(strategy, folder / "run", 3)
    trainer.strategy.state.init_from = str(folder / "weights/step=1")
    trainer.validate(module, loader(), verbose=False)
    norm = float(trainer.callback_metrics["norm"])
    trainer.fit(module, loader(), ckpt_path=word)
    return module.began, norm


@pytest.mark.parametrize(("strategy", "count"), STRATEGIES)
def test_init_from_weights_once(ranks, tmp_path, strategy, count):
    """The first start uses them, later ones resume."""
    ranks(fit, count, strategy, tmp_path / "weights", 1)
    starts = [ranks(fit_from_weights, count, tmp_path, strategy, AUTO) for _ in range(2)]
    assert [began for began, _ in starts[0]] == [0] * count
    assert [began for began, _ in starts[1]] == [-1] * count  # at the end of training
    assert len({norm for start in starts for _, norm in start}) == 1
    torch.manual_seed(5)
    assert starts[0][0][1] != float(Small().layer.weight.norm())


def fit_from_file(strategy: str, folder: Path, weights_only: bool | None) -> str:
    """Resume a Lightning file that holds an object; return the error or the first step."""
    module, trainer = Small(), trainer_of(strategy, folder, 3, callbacks=[], enable_checkpointing=False)
    try:
        trainer.fit(module, loader(), ckpt_path=str(folder / "file.ckpt"), weights_only=weights_only)
    except CheckpointError as error:
        return str(error)
    return f"began at {module.began}"


@pytest.mark.parametrize(("strategy", "count"), STRATEGIES)
def test_weights_only(ranks, tmp_path, strategy, count):
    """Including strategies that restore after setup, for which Lightning drops `weights_only`."""
    trainer = pl.Trainer(devices=1, max_steps=2, **QUIET)
    trainer.fit(Small(), loader())
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    saved = torch.load(tmp_path / "file.ckpt", weights_only=True)
    torch.save({**saved, "an object": Path("x")}, tmp_path / "file.ckpt")
    for weights_only in (None, True):
        for error in ranks(fit_from_file, count, strategy, tmp_path, weights_only):
            assert "trust=true" in error
    assert ranks(fit_from_file, count, strategy, tmp_path, False) == ["began at 2"] * count
