from __future__ import annotations

import logging

import pytest
import sklearn.datasets  # noqa: F401 - its first import sets environment variables
import torch
from lightning.pytorch import seed_everything

from tests.parity.harness import QUIET
from trainwright import Trainer, compose
from trainwright.recipes.extras import check_scikit_learn
from trainwright.recipes.vision.digits import DigitsData, DigitsModule


@pytest.mark.thorough
def test_accuracy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    seed_everything(0)
    module, data = DigitsModule(), DigitsData(batch_size=32)
    trainer = Trainer(max_epochs=3, devices=1, limit_val_batches=0, **QUIET)
    trainer.fit(module, data)
    accuracy = trainer.test(module, data, verbose=False)[0]["test_acc"]
    predicted = torch.cat(trainer.predict(module, data))
    wanted = data.splits["test"].tensors[1]
    assert predicted.shape == (360,)
    assert accuracy == pytest.approx((predicted == wanted).float().mean().item())  # every image counts once
    assert accuracy > 0.95


def test_split_is_constant_and_complete() -> None:
    data = DigitsData()
    data.setup("fit")
    torch.manual_seed(99)
    again = DigitsData()
    again.setup("test")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 1257, "val": 180, "test": 360}
    for name in data.splits:
        assert torch.equal(data.splits[name].tensors[0], again.splits[name].tensors[0])
    images = torch.cat([split.tensors[0] for split in data.splits.values()])
    assert images.shape == (1797, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)


def test_missing_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(recipe="digits")
    assert check_scikit_learn(config, 1) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    assert 'pip install "trainwright[recipes]"' in check_scikit_learn(config, 1)[0]
    with pytest.raises(ImportError, match=r'recipe digits .* pip install "trainwright\[recipes\]"'):
        DigitsData().setup("fit")
