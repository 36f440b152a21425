"""``ParameterServerStrategy`` in the Trainer, against DDP."""

import warnings
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.harness import Case, make_trainer
from tests.parity.harness import train as train_case
from tests.strategies.local_updates.test_together import Spoil
from trainwright import LossGuard
from trainwright.callbacks.progress.global_loss import GlobalLoss
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.callbacks.traffic.stragglers import Stragglers
from trainwright.strategies.parameter_server.server import sharder
from trainwright.strategies.parameter_server.strategy import ParameterServerStrategy


def train(case: Case, strategy: str, options: dict[str, Any], **trainer_options: Any) -> Any:
    with patch.object(sharder, "LEAST_NUMEL", 64):  # several parts, pushed during backward
        record = train_case(case, strategy, options, **trainer_options)
    record.gradients = {}  # only servers have the average
    return record


@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "servers"), [
    (Case(), 1),
    (Case(module="decoder-adamw", clipping="norm", accumulation=2, steps=20), 2),
    (Case(module="decoder-adamw", clipping="value"), 2),
], ids=["sgd", "norm", "value"])  # fmt: skip
def test_sync_is_bit_identical_to_ddp(ranks, case, servers):
    ours = ranks(train, 2, case, "parameter_server", {"servers": servers})
    theirs = ranks(train, 2, case, "ddp", {})
    for each in ours:
        assert each.losses == theirs[0].losses  # a sum of two is bit-exact
        assert all(torch.equal(each.parameters[name], p) for name, p in theirs[0].parameters.items())


class Groups(pl.LightningModule):
    """Two groups, a schedule, a frozen and a tied parameter, and running statistics."""

    def __init__(self, manual: bool = False, lbfgs: bool = False, width: int = 8, gamma: float = 0.5) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.lbfgs, self.gamma = lbfgs, gamma
        # The gradient of a bias before BatchNorm is rounding noise, which Adam amplifies.
        self.first, self.norm = nn.Linear(4, width, bias=False), nn.BatchNorm1d(width)
        self.second, self.third = nn.Linear(width, width), nn.Linear(width, width)
        self.third.weight = self.second.weight
        self.frozen, self.last = nn.Linear(width, width), nn.Linear(width, 1)
        self.frozen.requires_grad_(False)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        hidden = self.third(torch.relu(self.second(self.norm(self.first(inputs)))))
        loss = nn.functional.mse_loss(self.last(torch.relu(self.frozen(hidden)))[:, 0], targets)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)
        self.losses.pop()

    def configure_optimizers(self) -> Any:
        if self.lbfgs:
            return torch.optim.LBFGS(self.parameters())
        groups = [
            {"params": [*self.first.parameters(), *self.norm.parameters(), *self.frozen.parameters()]},
            {"params": [*self.second.parameters(), self.third.bias, *self.last.parameters()], "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=self.gamma)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(48, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=4, shuffle=True)


def fit(
    strategy: str, options: dict[str, Any], steps: int, ckpt: str | None = None, gamma: float = 0.5, **more: Any
) -> Any:
    """Train and validate; returns the module and its Trainer."""
    pl.seed_everything(3, verbose=False)
    module = Groups(gamma=gamma)
    trainer = make_trainer(strategy, options, max_steps=steps, max_epochs=-1, **more)
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt)
    return module, trainer


def outcome(module: pl.LightningModule, trainer: Any) -> tuple[torch.Tensor, list[float], float]:
    values = [p.detach().view(-1) for p in module.parameters()]
    return torch.cat(values), module.losses, float(trainer.callback_metrics["val_loss"])


def features(precision: str) -> Any:
    """Return parameters, losses and learning rates of the same run under DDP and sync."""
    more = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "precision": precision}
    results = []
    for strategy, options in (("ddp", {}), ("parameter_server", {"servers": 2})):
        module, trainer = fit(strategy, options, 6, **more)
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        results.append((*outcome(module, trainer)[:2], rates, trainer.global_step))
    return results


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_groups_schedule_clipping_and_accumulation_match_ddp(ranks, precision):
    for (theirs, losses, rates, steps), (ours, our_losses, our_rates, our_steps) in ranks(features, 2, precision):
        tolerance = 1e-5 if precision == "32-true" else 2e-3
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        assert our_losses == pytest.approx(losses, rel=tolerance * 10)
        assert (our_rates, our_steps) == (rates, steps)


def across() -> Any:
    """Return the parameters of runs that change their strategy midway, and of one that does not."""
    server, results = {"servers": 2}, {}
    module, trainer = fit("ddp", {}, 8)
    results["whole"] = outcome(module, trainer)[0]
    kinds = {"ddp": {}, "parameter_server": server, "zero1": {}}
    for before, after in (("parameter_server", "ddp"), ("ddp", "parameter_server"), ("parameter_server", "zero1")):
        _, trainer = fit(before, kinds[before], 4)
        path = f"{before}_{after}"
        trainer.save_checkpoint(path)
        module, trainer = fit(after, kinds[after], 8, ckpt=path)
        results[path] = outcome(module, trainer)[0]
    _, trainer = fit("parameter_server", server, 4)
    trainer.save_checkpoint("same")
    results["same"] = outcome(*fit("parameter_server", server, 8, ckpt="same"))[0]
    results["served"] = outcome(*fit("parameter_server", server, 8))[0]
    return results


def test_run_states_move_between_strategies(ranks):
    results = ranks(across, 2)[0]
    whole = results.pop("whole")
    assert torch.equal(results["same"], results["served"])
    for parameters in results.values():
        torch.testing.assert_close(parameters, whole, rtol=1e-5, atol=1e-6)


def pushed() -> Any:
    """Return parameters of compressed runs (whole, resumed, rolled back), and warnings with other servers."""
    options: dict[str, Any] = {"servers": 2, "compression": {"name": "topk", "ratio": 0.1}}
    saver = RunStateCheckpoint("pushed", every_n_steps=3, save_at_end=False)
    fit("parameter_server", options, 4, callbacks=[saver], enable_checkpointing=True)
    whole = outcome(*fit("parameter_server", options, 6))[0]
    same = outcome(*fit("parameter_server", options, 6, ckpt=saver.last_model_path))[0]
    guard = LossGuard("rollback", snapshot_every_n_steps=2, threshold=None)
    back = outcome(*fit("parameter_server", options, 6, callbacks=[Spoil(), guard]))[0]
    assert guard.counts["rollbacks"] == 1
    said = []
    for strategy, others in (("parameter_server", {**options, "servers": 1}), ("ddp", {})):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            fit(strategy, others, 4, ckpt=saver.last_model_path)
        said.append([str(each.message) for each in warned if "not pushed yet" in str(each.message)])
    return whole, same, back, said


def test_push_residuals_are_restored_with_the_same_servers(ranks):
    (whole, same, back, said), others = ranks(pushed, 2)
    for parameters in (same, back, *others[:3]):
        assert torch.equal(whole, parameters)
    assert [len(texts) for texts in said] == [1, 1]
    assert all("the residual of compression=topk in workers" in text for (text,) in said)


def independent(options: dict[str, Any]) -> Any:
    """Train with independent steps, saving within an epoch, and resume."""
    saver = RunStateCheckpoint("saved", every_n_steps=5, save_at_end=False)
    more = {"callbacks": [saver], "enable_checkpointing": True}
    module, trainer = fit("parameter_server", options, 104, gamma=1.0, **more)
    buffers = torch.cat([buffer.detach().view(-1).float() for buffer in module.buffers()])
    parameters, _, loss = outcome(module, trainer)
    resumed, again = fit("parameter_server", options, 106, ckpt=saver.last_model_path, gamma=1.0)
    return parameters, buffers, loss, again.global_step, len(resumed.losses)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [
    {"consistency": "async", "delay_compensation": 0.04, "compression": "int8"},
    {"consistency": "ssp", "staleness": 1, "scale_by_staleness": True, "servers": 2},
], ids=["async", "ssp"])  # fmt: skip
def test_independent_workers_converge_to_equal_parameters(ranks, options):
    (first, buffers, loss, steps, made), second = ranks(independent, 2, options)
    assert torch.equal(first, second[0])
    assert torch.equal(buffers, second[1])
    assert loss < 1.0  # of targets with a variance of 4
    assert (steps, made) == (106, 6)  # resumed from step 100


class TooFast(Groups):
    """Learning rate that is too large."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e3, momentum=0.5)


def diverging(options: dict[str, Any]) -> Any:
    """Return the warnings on a rank, and the ranks of the first non-finite loss."""
    losses = GlobalLoss(2)
    trainer = make_trainer("parameter_server", options, max_steps=12, max_epochs=-1, callbacks=[losses])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(TooFast(), loader())
    assert losses.diverged is not None
    return [str(each.message) for each in caught if "lr=" in str(each.message)], losses.diverged.ranks


@pytest.mark.parametrize(("options", "at_start"), [
    ({"consistency": "async"}, True), ({"consistency": "ssp", "scale_by_staleness": True}, False), ({}, False),
], ids=["async", "scaled", "sync"])  # fmt: skip
def test_learning_rate_warning_of_independent_workers(ranks, options, at_start):
    """Logged by the first rank at the start, unless rates are scaled, and at a non-finite loss."""
    (said, diverged), (second, also_diverged) = ranks(diverging, 2, options)
    assert second == []
    assert (diverged, also_diverged) == (((0,), (1,)) if options else ((0, 1), (0, 1)))
    assert ["Divide lr=1000 by about 2 (optimizer.lr=5e+02)" in text for text in said] == [True] * at_start + [False]
    assert "the first that is not finite" in said[-1]
    assert ("asynchronous workers" in said[-1]) == bool(options)


class Clamps(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        dist.barrier()  # the first rank's server ends with its refusal: the others must be past their pulls
        with torch.no_grad():
            pl_module.first.weight.clamp_(-0.01, 0.01)


class Fills(pl.Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.fill_(0.5)


def fill_at_the_end(consistency: str) -> Any:
    """Return the smallest and largest parameter, and the logged learning rates, after callbacks of a fit."""
    callbacks = [Fills(), LearningRateMonitor()]
    options = {"logger": DummyLogger(), "log_every_n_steps": 1, "callbacks": callbacks}
    trainer, module = make_trainer("parameter_server", {"consistency": consistency}, max_steps=4, **options), Groups()
    trainer.fit(module, loader())
    values = nn.utils.parameters_to_vector(module.parameters())
    return float(values.min()), float(values.max()), {name for name in trainer.callback_metrics if "lr-" in name}


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_callbacks_see_the_users_optimizer_and_may_write_at_the_end(ranks, consistency):
    for least, largest, rates in ranks(fill_at_the_end, 2, consistency):
        assert (least, largest) == (0.5, 0.5)
        assert rates == {"lr-AdamW/pg1", "lr-AdamW/pg2"}


def refusals() -> Any:
    """Return the errors of fits, on every rank."""
    first = dist.get_rank() == 0
    cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ({"manual": True}, {}, {}),
        ({"lbfgs": True}, {}, {}),
        ({"width": 8 if first else 6}, {}, {}),
        ({}, {"servers": 3}, {}),
        ({}, {"consistency": "async"}, {"callbacks": [Stragglers()]}),
        ({}, {"consistency": "async"}, {"callbacks": [Clamps()]}),
    ]
    texts = []
    for module, options, more in cases:
        trainer = make_trainer("parameter_server", options, max_steps=2, **more)
        with pytest.raises((ValueError, RuntimeError)) as error:
            trainer.fit(Groups(**module), loader())
        texts.append(str(error.value))
        dist.barrier()
    return texts


def test_errors_on_every_rank(ranks):
    words = [
        ["optimizes manually", "strategy=ddp"],
        ["LBFGS", "closure", "AdamW"],
        ["Rank(s) 1", "a different model", "first.weight"],
        ["servers=3 with 2 rank(s)", "servers=2"],
        ["Stragglers", "step independently", "consistency=sync"],
        ["has written parameters", "consistency=sync"],
    ]
    for texts in ranks(refusals, 2):
        for text, expected in zip(texts, words, strict=True):
            assert all(word in text for word in expected), text


@pytest.mark.parametrize(("options", "words"), [
    ({"consistency": "ssp", "staleness": -1}, ["staleness=-1", "whole number", "staleness=3"]),
    ({"consistency": "ssp", "staleness": 0}, ["staleness=0", "consistency=sync"]),
    ({"staleness": 2}, ["staleness=2", "ssp only"]),
    ({"consistency": "eventual"}, ["eventual", "sync, ssp, async"]),
    ({"servers": 0}, ["servers=0", "servers=1"]),
    ({"compression": "powersgd"}, ["powersgd", "int8"]),
    ({"delay_compensation": 0.1}, ["delay_compensation=0.1", "never late"]),
    ({"overlap": "always"}, ["overlap=always", "true or false"]),
])  # fmt: skip
def test_option_errors(options, words):
    with pytest.raises(ValueError, match=words[0]) as refused:
        ParameterServerStrategy(**options)
    assert all(word in str(refused.value) for word in words)
