"""Traffic, running statistics, mixed precision and guards under local updates."""

import math
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.parity.harness import make_trainer
from tests.parity.layout_modules import make_module
from tests.parity.layouts import Texts
from tests.strategies.contract.traffic import recorded
from tests.strategies.local_updates.cases import Outer, by_hand, difference, fit
from trainwright import LossGuard, Preemption
from trainwright.callbacks.guard.replica_check import ReplicaCheck

STEPS, EVERY = 6, 3


class Traffic(pl.Callback):
    """Counts elements of collectives from the first to the last step."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 0:
            self._open = recorded()
            self._seen = self._open.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEPS:
            self._open.__exit__(None, None, None)
            for each in self._seen:
                if each.elements > 4:  # not agreements at the start
                    self.sent[each.name] += each.elements


def traffic(options: dict[str, Any]) -> tuple[Counter[str], int]:
    watch = Traffic()
    # No checks for preemption in between.
    trainer = make_trainer(
        "diloco" if "compression" in options else "local_sgd",
        options,
        global_batch_size=12,
        max_steps=STEPS,
        callbacks=[watch, Preemption(check_seconds=1e6)],
        limit_val_batches=0,
    )
    module = make_module("gpt")
    module.training_step = lambda batch, batch_idx: module.loss(batch)  # type: ignore[method-assign] # logs nothing
    trainer.fit(module, DataLoader(Texts(72, 8), batch_size=6))
    return watch.sent, sum(parameter.numel() for parameter in module.parameters())


def test_parameters_are_sent_every_sync_every_steps(ranks: Any) -> None:
    sent, numel = ranks(traffic, 2, {"sync_every": EVERY})[0]
    assert sent == {"all_reduce": numel * STEPS // EVERY}
    sent, numel = ranks(traffic, 2, {"sync_every": EVERY, "compression": "bf16"})[0]
    # Bytes: halves are sent to the other rank, and their means back.
    assert sum(sent.values()) == 2 * 2 * numel * STEPS // EVERY
    assert "all_reduce" not in sent


class Normed(pl.LightningModule):
    """Running statistics, and a half-precision overflow on one replica."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = 1e6 if self.trainer.global_rank == 1 and batch_idx == 0 else 1e-2
        loss: Tensor = (self.net(batch["tokens"].float() / 24).float() * scale).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch["tokens"].float())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Statistics(pl.Callback):
    """Records running means in training and validation."""

    def __init__(self) -> None:
        self.own: list[Tensor] = []
        self.shown: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.own.append(pl_module.net[1].running_mean.clone())

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.shown.append(pl_module.net[1].running_mean.clone())


def train_normed(precision: str) -> tuple[list[Tensor], list[Tensor], Tensor, float, float]:
    watch, module = Statistics(), Normed()
    trainer = make_trainer(
        "local_sgd",
        {"sync_every": 3},
        precision=precision,
        max_steps=4,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        callbacks=[watch],
    )
    trainer.fit(module, DataLoader(Texts(32, 8), batch_size=4), DataLoader(Texts(4, 8), batch_size=2))
    state = trainer.strategy.optimizers[0].state
    scaler = getattr(trainer.strategy.precision_plugin, "scaler", None)
    steps = float(next(iter(state.values()))["step"])
    return watch.own, watch.shown, module.net[1].running_mean, steps, 1.0 if scaler is None else scaler.get_scale()


def test_running_statistics_are_averaged(ranks: Any) -> None:
    (own, shown, final, *_), (other, shown_other, final_other, *_) = ranks(train_normed, 2, "32")
    assert not torch.equal(own[1], other[1])
    assert torch.equal(shown[0], shown_other[0]), "every rank validates with the same"
    assert torch.allclose(shown[0], (own[1] + other[1]) / 2)
    assert torch.equal(own[2], other[2]), "averaged with the parameters"
    assert torch.equal(final, final_other)


def test_each_replica_skips_its_own_overflow(ranks: Any) -> None:
    (*_, steps, scale), (*_, steps_other, scale_other) = ranks(train_normed, 2, "16-mixed")
    assert steps == steps_other + 1
    assert scale == 2 * scale_other


def watched(strategy: str, options: dict[str, Any]) -> tuple[int | None, int]:
    check = ReplicaCheck(every_n_steps=1)
    fit(strategy, options, steps=5, callbacks=[check])
    return check.equal_at, len(check.found)


@pytest.mark.thorough
def test_replica_check_compares_synchronized_state(ranks: Any) -> None:
    assert ranks(watched, 2, "diloco", {"sync_every": 3}) == [(4, 0)] * 2
    assert ranks(watched, 4, "local_sgd", {"sync_every": 3, "tensor": 2}) == [(4, 0)] * 4


class Spoil(pl.Callback):
    """Sets the loss of one replica to NaN, once."""

    keeps_its_state = True

    def __init__(self) -> None:
        self.backs = self.times = 0

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 1 and not self.times:
            self.times += 1
            loss.data.mul_(math.nan)

    def on_gone_back(self, trainer: Any, pl_module: Any) -> None:
        self.backs += 1


STREAMING = {"sync_every": 4, "fragments": 2, "overlap_steps": 2}
GUARDED: dict[str, tuple[str, dict[str, Any]]] = {
    "local_sgd": ("local_sgd", {"sync_every": 3, "average_optimizer": True}),
    "streaming": ("diloco", {**STREAMING, "compression": {"name": "topk", "ratio": 0.1}}),
}


def guarded(policy: str, strategy: str, options: dict[str, Any]) -> Any:
    """Return a run without a fault, if rolled back, and one with it."""
    spoil = Spoil()
    guard = LossGuard(policy, snapshot_every_n_steps=2, threshold=None)  # type: ignore[arg-type]
    whole = fit(strategy, options, steps=8) if policy == "rollback" else None
    return whole, fit(strategy, options, steps=8, callbacks=[spoil, guard]), spoil.backs


@pytest.mark.thorough
@pytest.mark.parametrize("kind", list(GUARDED))
def test_replicas_roll_back_together(ranks: Any, kind: str) -> None:
    # From a snapshot after the fifth step, with an average in flight.
    for whole, back, backs in ranks(guarded, 2, "rollback", *GUARDED[kind]):
        assert backs == 1
        for one, other in zip([*whole.own, whole.final], [*back.own, back.final], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_replicas_skip_a_step_together(ranks: Any) -> None:
    seen = [each for _, each, _ in ranks(guarded, 2, "skip", "diloco", STREAMING)]
    history = by_hand(seen, Outer(4, 0.7, 0.9, True, 2, 2, 0.5))
    for each in seen:
        assert len(each.own) == 8
        assert max(map(difference, each.own, history[each.replica])) < 2e-6
