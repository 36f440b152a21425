from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch.optim import Adagrad, AdamW

from tests.parity.harness import QUIET, Recorder, make_trainer
from trainwright import Trainer, compose
from trainwright.recipes.tables.wide_deep import COLUMNS, ClickData, ClickLog, WideDeep, draw_click_log, hashed
from trainwright.recipes.tables.wide_deep_checks import check_sparse

SMALL: dict[str, Any] = {"rows": 256, "wide_rows": 512, "dim": 4, "hidden": (8,)}


def fit(strategy: str, sparse: bool, micro: int) -> list[float]:
    """Return the losses of steps of 32 impressions."""
    seed_everything(0)
    recorder = Recorder()
    options = {"max_steps": 6, "max_epochs": -1, "global_batch_size": 32, "limit_val_batches": 0}
    trainer = make_trainer(strategy, callbacks=[recorder], **options)
    trainer.fit(WideDeep(sparse=sparse, **SMALL), ClickData(micro, samples=400))
    return recorder.record.losses


def test_losses_do_not_depend_on_layout_and_sparsity(ranks: Callable[..., list[Any]]) -> None:
    (expected,) = ranks(fit, 1, "single", False, 32)
    assert len(expected) == 6
    for strategy, sparse in (("ddp", False), ("ddp", True), ("zero3", False)):
        for found in ranks(fit, 2, strategy, sparse, 16):
            assert found == pytest.approx(expected, rel=1e-5), (strategy, sparse)


def loss_of_constant(log: ClickLog) -> float:
    """Return the mean log loss, in nats, of the best constant."""
    return F.binary_cross_entropy(log.clicked.mean().expand_as(log.clicked), log.clicked).item()


def test_learning_and_excess_loss(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    seed_everything(0)
    module, data = WideDeep(rows=2048, wide_rows=8192, sparse=True), ClickData(batch_size=256, samples=30_000)
    trainer = Trainer(max_epochs=1, devices=1, limit_val_batches=0, **QUIET)
    trainer.fit(module, data)
    result = trainer.test(module, data, verbose=False)[0]
    best, base = data.best_loss("test"), loss_of_constant(data.splits["test"])
    assert result["test_loss"] == pytest.approx(best + result["test_excess"], rel=1e-5)
    assert best < result["test_loss"] < best + 0.75 * (base - best)
    clicks = torch.cat(trainer.predict(module, data))
    assert clicks.shape == (3000,)
    assert clicks.mean().item() == pytest.approx(data.splits["test"].clicked.mean().item(), abs=0.05)


def test_click_log_is_deterministic() -> None:
    log, again, other = draw_click_log(5000), draw_click_log(5000), draw_click_log(5000, seed=1)
    assert torch.equal(log.ids, again.ids)
    assert torch.equal(log.clicked, again.clicked)
    assert not torch.equal(log.clicked, other.clicked)
    assert log.best_loss() < loss_of_constant(log)
    # Few values are frequent: a batch touches few rows.
    assert len(log.ids[:128, 0].unique()) < 100
    assert len(log.ids[:, 0].unique()) > 500


def test_hashes_spread_evenly() -> None:
    ids = draw_click_log(20_000, exponent=0).ids[:, 0].unique()
    assert len(ids) == COLUMNS["user"]
    rows = hashed(ids, 64)
    assert rows.min() >= 0
    counts = torch.bincount(rows, minlength=64)
    assert counts.max() < 3 * counts.float().mean()


def test_sparse_gradients_are_refused() -> None:
    def problems(*overrides: str) -> list[str]:
        return check_sparse(compose(recipe="wide_deep", overrides=list(overrides)), 1)

    assert problems("optimizer=adamw") == []
    assert problems("module.sparse=true") == problems("module.sparse=true", "strategy=ddp") == []
    (said,) = problems("module.sparse=true", "optimizer=adamw")
    assert "torch.optim.AdamW" in said
    assert "optimizer=adagrad" in said
    (said,) = problems("module.sparse=true", "strategy=zero2")
    assert "ZeroStrategy" in said
    assert "module.sparse=false" in said


def test_optimizers() -> None:
    module = WideDeep(sparse=False, optimizer=partial(AdamW, lr=1e-3), **SMALL)
    assert type(module.configure_optimizers()) is AdamW
    assert type(WideDeep().configure_optimizers()) is Adagrad
