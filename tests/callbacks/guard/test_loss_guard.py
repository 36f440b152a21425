"""The loss guard under every layout: results after faults, and messages."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.callbacks.modules import Written
from tests.trainer.memory_harness import PLACES, Losses, Model, fit, make_loader
from trainwright.callbacks.guard import loss_guard
from trainwright.callbacks.guard.loss_guard import DivergedError, LossGuard, LossHistory
from trainwright.callbacks.guard.nonfinite import any_nonfinite
from trainwright.callbacks.progress.global_loss import GlobalLoss
from trainwright.callbacks.progress.throughput import Throughput
from trainwright.strategies.contract.gradients import local_tensor

STEPS = 9  # 5 per epoch


class Faulty(Model):
    """Multiplies its loss by ``factor`` at a step or for a sample.

    Args:
        step: number of the optimizer step, the first being 1.
        times: how often that step is spoilt, however often training goes back.
        rank: that does so; ``None``: every one.
        sample: index of a sample whose loss is always bad.
        factor: what the loss is multiplied by.
    """

    def __init__(
        self, step: int = 0, times: int = 1, rank: Any = None, sample: int = -1, factor: float = math.nan, **more: Any
    ) -> None:
        super().__init__(**more)
        self._fault = step, times, rank
        self._sample, self._factor = sample, factor
        self.gone_back = 0

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        step, times, rank = self._fault
        is_step = self.trainer.global_step + 1 == step and self.gone_back < times
        is_here = is_step and rank in (None, self.trainer.global_rank)
        return loss * self._factor if is_here or self._sample in batch[0].tolist() else loss


class Count(pl.Callback):
    """Counts rollbacks in the module."""

    keeps_its_state = True

    def on_gone_back(self, trainer: Any, pl_module: Any) -> None:
        pl_module.gone_back += 1


class BadGradient(pl.Callback):
    """Puts inf into a gradient on one rank before a step, once."""

    keeps_its_state = True

    def __init__(self, step: int, rank: int, name: str) -> None:
        self._step, self._rank, self._name, self._done = step, rank, name, False

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 == self._step and trainer.global_rank == self._rank and not self._done:
            self._done = True
            local_tensor(dict(trainer.strategy.named_gradients())[self._name]).view(-1)[0] = math.inf


class BadBackward(BadGradient):
    """Does so before gradients are averaged."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == self._rank:
            dict(pl_module.named_parameters())[self._name].register_hook(lambda each: self._spoilt(each, trainer))

    def _spoilt(self, gradient: Tensor, trainer: Any) -> Tensor:
        is_due = trainer.global_step + 1 == self._step and not self._done
        self._done |= is_due
        return gradient * math.inf if is_due else gradient

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Overrides the base class."""


def guarded(
    place: str, guard: dict[str, Any], module: dict[str, Any], first: Sequence[Any] = (), **options: Any
) -> dict[str, Any]:
    watch = LossGuard(**{"snapshot_every_n_steps": 2, "min_history": 2, "threshold": 50.0, **guard})
    written, model = Written(), Faulty(**module)
    error, recorder = None, Losses()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            given = {"max_steps": STEPS, "logger": [written], "log_every_n_steps": 1, **options}
            recorder, _ = fit(place, [*first, watch, Count()], model, **given)
        except DivergedError as stopped:
            error = str(stopped)
    trainer = model.trainer
    return {
        **{name: getattr(recorder, name) for name in ("losses", "parameters", "hooks")},
        "said": [str(each.message) for each in caught if str(each.message).startswith("LossGuard")],
        "counts": watch.counts,
        "error": error,
        "skipped": [(each.epoch, each.first, each.last) for each in trainer.fit_loop.skipped],
        "written": written.rows,
        "step": trainer.global_step,
        "seen": model.seen,
    }


def both(place: str, guard: dict[str, Any], module: dict[str, Any], *first: Any, **options: Any) -> Any:
    """Return the results of a run without faults, and of one with a fault and the guard."""
    recorder, _ = fit(place, module=Faulty(), **{"max_steps": STEPS, **options})
    return (recorder.losses, recorder.parameters), guarded(place, guard, module, first, **options)


def assert_undisturbed(expected: tuple[dict[int, float], dict[str, Tensor]], found: dict[str, Any]) -> None:
    losses, parameters = expected
    assert found["error"] is None
    assert found["losses"] == losses
    assert all(torch.equal(found["parameters"][name], value) for name, value in parameters.items())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("place", "step", "factor"), [  # within an epoch, and across its end
    ("single", 7, math.nan), ("ddp", 4, 1e4), ("zero3", 4, math.nan), ("zero3", 7, 1e4),
    ("pipeline x shard", 4, math.nan), ("pipeline x shard", 7, 1e4),
])  # fmt: skip
def test_transient_fault_leaves_no_trace(ranks, place, step, factor):
    last = PLACES[place][2] - 1
    module = {"step": step, "rank": last, "factor": factor}
    for expected, found in ranks(both, PLACES[place][2], place, {"snapshot_every_n_steps": 3}, module, timeout=90):
        assert_undisturbed(expected, found)
        assert found["counts"] == {"skipped": 0, "rollbacks": 1, "transient": 1, "reproducible": 0}
        assert found["hooks"].count("train start") == 1
        assert found["skipped"] == []
        [said] = found["said"] or [""]
        if said:
            assert f"step {step - 1}: " in said  # as loggers count, from 0
            assert f"Rolling back to step {step - 3} in memory" in said  # one after the first, then every third
            assert ("the loss jumped to" if factor == 1e4 else "the loss is not finite on data rank") in said


@pytest.mark.sample(1)
@pytest.mark.parametrize(("place", "planted", "where"), [
    ("ddp", BadBackward, "ranks 0, 1"),  # after averaging, all ranks have it
    ("pipeline x shard", BadGradient, "rank 3"),
])  # fmt: skip
def test_nonfinite_gradient_is_named(ranks, place, planted, where):
    name, last = "blocks.3.inner.weight", PLACES[place][2] - 1
    for rank, (expected, found) in enumerate(ranks(both, last + 1, place, {}, {}, planted(4, last, name))):
        assert_undisturbed(expected, found)
        if rank == 0:
            assert f"the gradient of {name} is not finite, the first in backward ({where})" in found["said"][0]


def alone(planted: BadGradient) -> str:
    """Return the error of a rank if averaged gradients are bad on one rank only."""
    loss_guard._ALONE_SECONDS = 1.0
    try:
        guarded("ddp", {}, {}, [planted])
    except Exception as error:
        return str(error)
    return ""


def test_averaged_gradients_bad_on_one_rank(ranks):
    other, lone = ranks(alone, 2, BadGradient(4, 1, "blocks.3.inner.weight"))
    assert "step 3: a gradient is NaN or infinite on rank 1, and is not on others" in lone
    assert "step 3" not in other


def test_nonfinite_loss_names_rank_and_micro_batch(ranks):
    results = ranks(guarded, 2, "ddp", {}, {"step": 4, "rank": 1})
    assert "the loss is not finite on data rank 1 (rank 1, micro-batch 0); the gradient of " in results[0]["said"][0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("place", "workers"), [("single", 1), ("pipeline x shard", 0)])
def test_bad_sample_is_skipped(ranks, place, workers):
    bad = 13
    loader = make_loader(num_workers=workers)
    guard = {"skip_steps": 1, "max_rollbacks": 10}
    for rank, found in enumerate(ranks(guarded, PLACES[place][2], place, guard, {"sample": bad}, loader=loader)):
        assert found["step"] == STEPS
        assert found["counts"]["reproducible"] == 2  # in each of two epochs
        assert found["counts"]["rollbacks"] == 4
        assert all(math.isfinite(loss) for loss in found["losses"].values())
        (first_epoch, first, last), (second_epoch, *_) = found["skipped"]
        assert (first_epoch, second_epoch, last - first) == (0, 1, 1)
        if rank == 0:
            assert "It recurred, so the samples of 1 step(s) from this one on are skipped." in found["said"][1]


def test_bad_sample_stops(ranks):
    guard = {"on_reproducible": "stop"}
    for found in ranks(guarded, 2, "ddp", guard, {"sample": 13}):
        assert "it recurred when the same steps were repeated. Training ends" in found["error"]
        assert found["counts"]["rollbacks"] == 1


@pytest.mark.parametrize(("guard", "reason"), [
    ({"max_rollbacks": 2}, "2 bad step(s) of the last 1000 were rolled back already"),
    ({"policy": "skip", "max_skips": 3}, "3 bad step(s) of the last 1000 were dropped already"),
    ({"policy": "stop"}, "step 4: NaN or infinity"),
])  # fmt: skip
def test_persistent_fault_ends_training(ranks, guard, reason):
    for found in ranks(guarded, 2, "ddp", {"skip_steps": 1, **guard}, {"step": 5, "times": 100}):
        assert reason in found["error"]
        assert "weights and checkpoints are those before that step" in found["error"]
        assert found["step"] == 4


def test_no_copy_to_roll_back_to(ranks):
    [found] = ranks(guarded, 1, "single", {}, {"step": 1})
    assert "there is no copy in memory yet" in found["error"]


def test_back_steps(ranks):
    guard = {"snapshot_every_n_steps": 1, "keep_snapshots": 3, "back_steps": 2}
    [(expected, found)] = ranks(both, 1, "single", guard, {"step": 8})
    assert_undisturbed(expected, found)
    assert "Rolling back to step 5 in memory" in found["said"][0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [
    {"val_check_interval": 3, "limit_val_batches": 1},
    {"gradient_clip_val": 0.5},
    {"precision": "bf16-mixed"},
    {"profiler": "simple"},
    {"loss_weighting": "micro_batch", "max_epochs": 2, "max_steps": -1},
])  # fmt: skip
def test_with_other_options(ranks, options):
    for expected, found in ranks(both, 2, "ddp", {}, {"step": 7, "rank": 1}, **options):
        assert_undisturbed(expected, found)
        assert found["counts"]["transient"] == 1


def averaged(place: str) -> Any:
    # At the end the module has the averaged weights.
    one, other = (pl.callbacks.EMAWeightAveraging(decay=0.5) for _ in range(2))
    recorder, _ = fit(place, [one], Faulty(), max_steps=STEPS)
    return (recorder.losses, recorder.parameters), guarded(place, {}, {"step": 7}, [other])


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["single", "zero3"])
def test_weight_averages_are_rolled_back(ranks, place):
    for expected, found in ranks(averaged, PLACES[place][2], place):
        assert_undisturbed(expected, found)
        assert found["counts"]["transient"] == 1


def test_dropping_is_equal_under_all_layouts(ranks):
    module = {"sample": 13, "dropout": 0.0}
    places = ("single", "ddp", "zero3", "pipeline x shard")
    results = [ranks(guarded, PLACES[place][2], place, {"policy": "skip"}, module)[0] for place in places]
    for found in results:
        assert found["step"] == STEPS
        assert found["counts"]["skipped"] == 2
        assert found["skipped"] == results[0]["skipped"]
        assert found["losses"] == pytest.approx(results[0]["losses"], rel=1e-4)
        assert "The step is dropped." in found["said"][0]


def test_fp16_scaler_overflow_is_no_fault(ranks):
    [found] = ranks(guarded, 1, "single", {"policy": "stop"}, {}, precision="16-mixed")
    assert found["error"] is None
    assert found["step"] == STEPS


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["single", "zero3"])
def test_bad_loss_with_fp16_scaler(ranks, place):
    for found in ranks(guarded, PLACES[place][2], place, {}, {"step": 5}, precision="16-mixed"):
        assert found["error"] is None
        assert found["counts"]["transient"] == 1


def test_logged_columns(ranks):
    [found] = ranks(guarded, 1, "single", {}, {"step": 5})
    columns = {name for _, row in found["written"] for name in row}
    assert {"guard/skipped", "guard/rollbacks", "guard/transient", "guard/reproducible", "guard/z_score"} <= columns
    rollbacks = [row["guard/rollbacks"] for _, row in found["written"] if "guard/rollbacks" in row]
    assert rollbacks == [1.0, 1.0]


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_exact_loss_is_logged(ranks, policy):
    guard, watching = {"policy": policy, "skip_steps": 1}, [GlobalLoss(every_n_steps=4), Throughput(every_n_steps=2)]
    for found in ranks(guarded, 2, "ddp", guard, {"sample": 25}, watching):
        logged = {step + 1: row["loss"] for step, row in found["written"] if "loss" in row}
        assert logged == pytest.approx(found["losses"])
        assert found["counts"]["skipped" if policy == "skip" else "rollbacks"] > 0


def test_history():
    history = LossHistory(window=4, min_history=3)
    history.add(1, 100.0)
    history.add(2, 1.0)
    assert history.jump(5.0) is None
    for step, loss in ((3, 2.0), (4, 3.0), (5, 2.0)):
        history.add(step, loss)
    z_score, part = history.jump(5.0)  # of 1, 2, 3, 2
    assert part == pytest.approx(1.5)
    assert z_score == pytest.approx(3.0 / (1.4826 * 0.5))
    history.forget_after(4)
    assert history.entries() == [(2, 1.0), (3, 2.0), (4, 3.0)]
    flat = LossHistory(window=4, min_history=2)
    flat.restore([(1, 2.0), (2, 2.0)])
    assert flat.jump(2.0) == (0.0, 0.0)
    assert flat.jump(2.1)[0] == math.inf


def test_flat_loss_has_no_jump():
    guard = LossGuard(min_history=2)
    guard._history.restore([(1, 2.0), (2, 2.0), (3, 2.0)])
    seen = {"bad_loss": 0.0, "bad_gradient": 0.0, "has_loss": 1.0}
    assert guard._fault({**seen, "loss": 2.1}) is None
    said = guard._fault({**seen, "loss": 2.3})
    assert said == "the loss jumped to 2.3, inf robust standard deviations (allowed: 6) and 15 % above the median"
    assert guard._fault({**seen, "loss": 0.1}) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nonfinite(value, dtype):
    tensors = [torch.full((3, 5), 3e4, dtype=dtype), torch.zeros(0), torch.ones(70, dtype=torch.float32) * 1e38]
    assert not any_nonfinite(tensors, torch.device("cpu"))
    tensors[0][1, 4] = value
    assert any_nonfinite(tensors, torch.device("cpu"))


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WithLBFGS(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(("module", "callbacks", "message"), [
    (Manual, [], "optimizes manually"),
    (WithLBFGS, [], "LBFGS computes the loss several times"),
    (Model, [pl.callbacks.StochasticWeightAveraging(0.1)], "StochasticWeightAveraging"),
])  # fmt: skip
def test_refused(module, callbacks, message):
    options = {} if module is not Manual else {"global_batch_size": None}
    with pytest.raises(ValueError, match=message):
        fit("single", [LossGuard(), *callbacks], module(), **options)
