"""Whole checkpoint files under layouts: complete state, resumed to the bit, or on one process within rounding.

A ``CheckpointIO`` plugin of the user writes such files; without one run states are written (``test_run_state.py``), in
which averaged weights are tested here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.utils.data import DataLoader

from tests.parity.harness import Record, make_trainer
from tests.parity.layout_modules import make_module
from tests.parity.layouts import LayoutCase, Texts, WholeRecorder, data_ranks, run
from trainwright.checkpoint.read.run_state import RunState, materialised

SAVED_AT, STEPS = 2, 4

CASES = {
    "tensor": (2, LayoutCase("gpt2-small", {"tensor": 2, "shard": 1})),
    "pipeline": (2, LayoutCase("gpt2", {"pipeline": 2, "schedule": "interleaved_1f1b"})),
    "expert": (2, LayoutCase("mixtral", {"expert": 2})),
    "pipeline x shard, stage 1": (4, LayoutCase("gpt2-small", {"pipeline": 2, "shard": 2, "stage": 1})),
    "tensor x shard": (4, LayoutCase("gpt2-small", {"tensor": 2, "shard": 2})),
}


def fit(case: LayoutCase, **options: Any) -> Record:
    trainer = {"plugins": [TorchCheckpointIO()]}
    return run(replace(case, optimizer="adamw", steps=STEPS, trainer=trainer), **options)


def save_and_resume(case: LayoutCase, folder: str) -> tuple[Record, Record]:
    whole = fit(case, save=(folder, SAVED_AT))
    return whole, fit(case, resume=f"{folder}/step={SAVED_AT}.ckpt", spoil=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(CASES))
def test_checkpoints_hold_the_whole_state(ranks, tmp_path, name):
    size, case = CASES[name]
    results = ranks(save_and_resume, size, case, str(tmp_path), timeout=120)
    for whole, resumed in results:
        assert resumed.losses == whole.losses[SAVED_AT:]
        for key, value in whole.parameters.items():
            assert torch.equal(resumed.parameters[key], value), key

    checkpoint = torch.load(tmp_path / f"step={SAVED_AT}.ckpt", weights_only=True)
    module = make_module(case.network)
    assert list(checkpoint["state_dict"]) == list(module.state_dict())
    for key, value in module.state_dict().items():
        assert checkpoint["state_dict"][key].shape == value.shape, key
    shapes = [parameter.shape for parameter in module.parameters()]
    states = checkpoint["optimizer_states"][0]["state"]
    assert [states[index]["exp_avg"].shape for index in range(len(shapes))] == shapes

    saved, single = str(tmp_path / f"step={SAVED_AT}.ckpt"), replace(case, strategy="single", options={})
    (alone,) = ranks(fit, 1, single, resume=saved, spoil=True, init_group=False)
    # AdamW makes a whole step of what rounding leaves of a gradient of zero, so parameters are compared above only.
    assert alone.losses == pytest.approx(results[0][0].losses[SAVED_AT:], rel=1e-5)


def average(case: LayoutCase, folder: str) -> Any:
    """Train, save and resume with averaged weights; return each run's record and validation loss."""
    trainers = []
    for resumed in (None, Path(folder) / f"step={SAVED_AT}.ckpt"):
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)
        recorder = WholeRecorder()
        trainer = make_trainer(
            case.strategy,
            dict(case.options),
            max_steps=STEPS,
            val_check_interval=1,
            check_val_every_n_epoch=None,
            callbacks=[EMAWeightAveraging(decay=0.5), recorder, *([] if resumed else [saver])],
            enable_checkpointing=resumed is None,
        )
        loader = DataLoader(Texts(32, case.length), batch_size=8 // data_ranks(case))
        held_out = DataLoader(Texts(8, case.length), batch_size=4 // data_ranks(case))
        trainer.fit(make_module(case.network), loader, held_out, ckpt_path=resumed)
        trainers.append((recorder.record, trainer.callback_metrics["val_loss"].item()))
    return trainers


@pytest.fixture(scope="module")
def averaged_alone(pool, tmp_path_factory) -> tuple[Any, Path]:
    """Return the result of one process, and where it saved."""
    folder = tmp_path_factory.mktemp("one")
    return pool.run(average, 1, LayoutCase("gpt2-small", strategy="single"), str(folder), init_group=False)[0], folder


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "options"), [(2, {"tensor": 2}), (4, {"pipeline": 2, "shard": 2}), (4, {"pipeline": 2, "tensor": 2})]
)
def test_averaged_weights(ranks, averaged_alone, tmp_path, size, options):
    alone, one_folder = averaged_alone
    results = ranks(average, size, LayoutCase("gpt2-small", {"shard": 1, **options}), str(tmp_path), timeout=120)
    for found in results:
        for (record, loss), (expected, expected_loss) in zip(found, alone, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            for name, parameter in expected.parameters.items():
                assert torch.allclose(record.parameters[name], parameter, atol=1e-5), name
    files = [folder / f"step={SAVED_AT}.ckpt" for folder in (one_folder, tmp_path)]
    one, many = (materialised(RunState.open(str(file)).tree) for file in files)
    for key in ("state_dict", "current_model_state"):
        assert list(many[key]) == list(one[key])
        for name, value in one[key].items():
            assert torch.allclose(many[key][name], value, atol=1e-5), (key, name)
