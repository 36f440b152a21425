from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim import SGD

from tests.callbacks.modules import Regression, loader
from tests.parity.harness import QUIET, make_trainer
from trainwright.recipes.data.text_corpus import TextCorpus
from trainwright.recipes.generation.generate import generate
from trainwright.recipes.generation.sampling import Sampling
from trainwright.recipes.gpt import sample_text
from trainwright.recipes.gpt.model import GPTConfig
from trainwright.recipes.gpt.module import GPTModule
from trainwright.recipes.gpt.sample_text import SampleText

SMALL = GPTConfig(layers=2, dim=32, heads=2, seq_len=16)


def test_loss_falls(text: Path) -> None:
    seed_everything(0)
    module, data = GPTModule(SMALL, warmup_steps=2), TextCorpus(text, seq_len=16, batch_size=16)
    trainer = LightningTrainer(max_steps=100, devices=1, **QUIET)
    before = trainer.validate(module, data, verbose=False)[0]
    trainer.fit(module, data)
    after = trainer.validate(module, data, verbose=False)[0]
    assert before["val_bpb"] == pytest.approx(8, abs=0.5)  # uniform over 256 bytes
    assert after["val_bpb"] < 3
    assert after["val_bpb"] == pytest.approx(after["val_loss"] / math.log(2), rel=1e-6)


def test_prediction_is_bits_per_byte_of_each_window_in_order(text: Path) -> None:
    module, data = GPTModule(SMALL), TextCorpus(text, seq_len=16, batch_size=7)
    trainer = LightningTrainer(devices=1, **QUIET)
    predicted = torch.cat(trainer.predict(module, data))
    assert data.test is not None
    assert predicted.shape == (len(data.test),)
    ids = data.test[3].long()
    loss = torch.nn.functional.cross_entropy(module.eval()(ids[None, :-1])[0], ids[1:])
    assert predicted[3].item() == pytest.approx(loss.item() / math.log(2), rel=1e-5)
    assert trainer.test(module, data, verbose=False)[0]["test_bpb"] == pytest.approx(predicted.mean().item(), rel=1e-5)


def test_weight_decay_on_matrices_only(text: Path) -> None:
    module = GPTModule(SMALL, partial(SGD, lr=1.0, weight_decay=0.5), warmup_steps=3, schedule_steps=10)
    module.trainer = LightningTrainer(devices=1, **QUIET)
    configured = module.configure_optimizers()
    matrices, vectors = configured["optimizer"].param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.5, 0.0)
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(module.parameters()))
    assert configured["lr_scheduler"]["scheduler"].get_last_lr() == [0.25, 0.25]


def test_schedule_ends_with_the_run(text: Path) -> None:
    module, data = GPTModule(SMALL, warmup_steps=1, final_lr_factor=0.25), TextCorpus(text, seq_len=16)
    trainer = LightningTrainer(max_steps=5, devices=1, **QUIET)
    trainer.fit(module, data)
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0] == pytest.approx(0.25 * 4e-3)


def deferred_fit(strategy: str, folder: str, meta: bool) -> float:
    """Return the bits per byte of the test windows after training."""
    seed_everything(0)
    data = TextCorpus(Path(folder) / "text.txt", seq_len=16, batch_size=8)
    trainer = make_trainer(strategy, max_steps=6, max_epochs=-1, global_batch_size=16)
    module = GPTModule(SMALL, meta=meta)
    trainer.fit(module, data)
    return float(torch.cat(trainer.predict(module, data)).mean())


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_deferred_build_trains(text: Path, ranks: Callable[..., list[Any]], strategy: str) -> None:
    deferred, ordinary = (ranks(deferred_fit, 2, strategy, str(text.parent), meta)[0] for meta in (True, False))
    assert 0 < deferred < 8
    assert deferred == pytest.approx(ordinary, rel=0.1)


# ---- the sample


def test_sample_is_reproducible_and_keeps_the_random_state() -> None:
    torch.manual_seed(0)
    module, prompt = GPTModule(SMALL), [list(b"the quick brown fox")]
    state = torch.random.get_rng_state()
    sampling = Sampling(30, temperature=0.8, seed=1)
    assert generate(module, prompt, sampling) == generate(module, prompt, sampling)
    assert generate(module, prompt, sampling) != generate(module, prompt, replace(sampling, seed=2))
    assert torch.equal(state, torch.random.get_rng_state())


def test_control_characters_are_replaced(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_text, "continued", lambda *_: [list(b"a\x1b[2J\xff\n\tb")])
    trainer = LightningTrainer(
        max_steps=1, devices=1, default_root_dir=tmp_path, callbacks=[SampleText(prompt=">")], **QUIET
    )
    trainer.fit(GPTModule(SMALL), TextCorpus(text, seq_len=16, batch_size=8))
    assert ">a\ufffd[2J\\xff\n\tb\n" in capsys.readouterr().out


def test_sample_is_printed_and_written(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = TensorBoardLogger(tmp_path / "run", name="", version="")
    options = {**QUIET, "logger": logger, "callbacks": [SampleText(length=20, prompt="the ")]}
    trainer = LightningTrainer(max_steps=2, devices=1, default_root_dir=tmp_path / "run", **options)
    trainer.fit(GPTModule(SMALL), TextCorpus(text, seq_len=16, batch_size=8))
    sample = (tmp_path / "run" / "sample.txt").read_text().rstrip("\n")
    assert sample.startswith("the ")
    assert f"Sample after 2 steps:\n{sample}" in capsys.readouterr().out
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert b"    the " in events.Tensors("sample/text_summary")[0].tensor_proto.string_val[0]


def test_other_modules_are_refused() -> None:
    trainer = LightningTrainer(devices=1, max_steps=1, callbacks=[SampleText()], **QUIET)
    with pytest.raises(TypeError, match="not a Regression. Type callbacks.sample=null"):
        trainer.fit(Regression(), loader())


def sampled_fit(strategy: str, precision: str, folder: str) -> str:
    seed_everything(0)
    options = {"max_steps": 4, "max_epochs": -1, "global_batch_size": 16, "default_root_dir": folder}
    callbacks = [SampleText(length=24, prompt="the ")]
    trainer = make_trainer(strategy, precision=precision, callbacks=callbacks, **options)
    trainer.fit(GPTModule(SMALL), TextCorpus(Path(folder) / "text.txt", seq_len=16, batch_size=4))
    return Path(folder, "sample.txt").read_text() if trainer.is_global_zero else ""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("strategy", "precision"), [("zero1", "16-mixed"), ("zero2", "bf16-true"), ("zero3", "bf16-mixed")]
)
def test_sample_of_a_sharded_model(text: Path, ranks: Callable[..., list[Any]], strategy: str, precision: str) -> None:
    first, second = ranks(sampled_fit, 2, strategy, precision, str(text.parent))
    assert first.startswith("the ")
    assert len(first.encode()) >= 24
    assert second == ""
