"""Rolling back to a state in memory within a fit gives the results of an undisturbed run."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.trainer.memory_harness import PLACES, Hold, Model, fit, make_loader
from trainwright.callbacks.guard.verdict import DropStep, RollBack
from trainwright.checkpoint.memory.snapshots import Snapshots
from trainwright.strategies.contract.gradients import local_tensor

STEPS = 8  # 5 per epoch


class Judge(pl.Callback):
    """Raises a verdict before an optimizer step, once.

    Args:
        at: number of the step, the first being 1.
        verdict: what to raise.
    """

    sees_parts = True  # it reads this rank's tensors

    keeps_its_state = True

    def __init__(self, at: int, verdict: Any) -> None:
        self._at, self._verdict, self._raised = at, verdict, False
        self.gone_back_to: list[int] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 == self._at and not self._raised:
            self._raised = True
            with torch.no_grad():  # the step must not use these gradients
                for _, gradient in trainer.strategy.named_gradients():
                    gradient.fill_(float("nan"))
            raise self._verdict()

    def on_gone_back(self, trainer: Any, pl_module: Any) -> None:
        self.gone_back_to.append(trainer.global_step)


def go_back(place: str, held_at: int, fault_at: int, keep: int = 1, skip_steps: int = 0, **options: Any) -> Any:
    """Run with and without a rollback; return losses, samples, hooks and metrics of both."""
    loader: dict[str, Any] = options.pop("loader", {})
    model: dict[str, Any] = options.pop("model", {})
    given = {"max_steps": STEPS, **options}
    calm, module = fit(place, [Hold()], Model(**model), loader=make_loader(**loader), **given)
    hold = Hold(*range(held_at, held_at + keep))
    hold.snapshots = Snapshots(keep)
    judge = Judge(fault_at, lambda: RollBack(hold.snapshots.newest(held_at), skip_steps))
    went, again = fit(place, [judge, hold], Model(**model), loader=make_loader(**loader), **given)
    return {
        "losses": (calm.losses, went.losses),
        "parameters": (calm.parameters, went.parameters),
        "hooks": (calm.hooks, went.hooks),
        "seen": (module.seen, again.seen),
        "gone_back_to": judge.gone_back_to,
        "global_step": again.trainer.global_step,
        "skipped": again.trainer.fit_loop.skipped,
        "metrics": [
            {name: value.item() for name, value in each.trainer.callback_metrics.items()} for each in (module, again)
        ],
    }


def check_undisturbed(result: dict[str, Any], held_at: int) -> None:
    assert result["gone_back_to"] == [held_at]
    expected, found = result["losses"]
    assert found == expected
    expected, found = result["parameters"]
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    expected, found = result["seen"]
    micro = len(expected) // STEPS
    assert found[: held_at * micro] == expected[: held_at * micro]
    assert found[-(STEPS - held_at) * micro :] == expected[held_at * micro :]
    assert result["metrics"][0] == result["metrics"][1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["single", "zero2", "pipeline"])
def test_rollback_within_epoch(ranks, place):
    for result in ranks(go_back, PLACES[place][2], place, 2, 4):
        check_undisturbed(result, 2)
        assert result["hooks"][0] == result["hooks"][1]


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "held_at"), [  # within an epoch, and at its end
    ("zero3", 3), ("single", 5), ("pipeline x shard", 5),
])  # fmt: skip
def test_rollback_across_epochs(ranks, place, held_at):
    for result in ranks(go_back, PLACES[place][2], place, held_at, 7):
        check_undisturbed(result, held_at)
        before, after = result["hooks"]
        # The epoch of the copied state is not started again; its end and the start of the next one are repeated.
        assert after == [*before[:4], "epoch 0 end", "epoch 1 start", *before[4:]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [
    {"loader": {"num_workers": 2}},
    {"loader": {"num_workers": 1, "persistent_workers": True}},
    {"reload_dataloaders_every_n_epochs": 1},
    {"val_check_interval": 3, "limit_val_batches": 1},
    {"profiler": "simple"},
    {"loader": {"batch_size": 3, "samples": 58}},
])  # fmt: skip
def test_rollback_with_options(ranks, options):
    for result in ranks(go_back, 2, "ddp", 3, 7, **options):
        check_undisturbed(result, 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("count", "loader"), [
    (2, {"kind": "stream", "num_workers": 1}), (2, {"kind": "shards", "num_workers": 2}),
    (2, {"kind": "shards", "num_workers": 1, "persistent_workers": True}),
    (2, {"kind": "batches"}), (1, {"kind": "stateful"}),
])  # fmt: skip
def test_rollback_with_loaders(ranks, count, loader):
    for result in ranks(go_back, count, "ddp" if count == 2 else "single", 3, 7, loader=loader):
        check_undisturbed(result, 3)


def steps_of(seen: list[list[int]], micro: int) -> list[list[int]]:
    """Return the samples of each optimizer step on this rank."""
    return [sum(seen[first : first + micro], []) for first in range(0, len(seen), micro)]


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "options"), [
    ("single", {}), ("zero3", {}), ("ddp", {"profiler": "simple"}),
])  # fmt: skip
def test_rollback_and_skip(ranks, place, options):
    for result in ranks(go_back, PLACES[place][2], place, 2, 4, skip_steps=2, **options):
        assert result["gone_back_to"] == [2]
        assert result["global_step"] == STEPS
        assert [(each.epoch, each.first, each.last) for each in result["skipped"]] == [(0, 3, 5)]
        before, after = (steps_of(seen, len(result["seen"][0]) // STEPS) for seen in result["seen"])
        # Steps 1 to 4, the third again, then the next epoch.
        assert after[:5] == [*before[:4], before[2]]
        assert after[5:8] == before[5:8]
        assert len(after) == STEPS + 2
        assert result["losses"][1].keys() == result["losses"][0].keys()
        assert result["losses"][1][3] == result["losses"][0][3]


class Saves(pl.Callback):
    """Saves a checkpoint after one optimizer step."""

    sees_parts = True  # it reads this rank's tensors

    keeps_its_state = True

    def __init__(self, folder: str, at: int) -> None:
        self._folder, self._at, self._done = folder, at, False

    def on_gone_back(self, trainer: Any, pl_module: Any) -> None:
        self._at = abs(self._at)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self._at and not self._done:
            self._done = True
            trainer.save_checkpoint(f"{self._folder}/at")


def skip_and_resume(place: str, folder: str, save_at: int) -> Any:
    hold = Hold(2)
    judge = Judge(4, lambda: RollBack(hold.snapshots.newest(), 1))
    saver = Saves(folder, -save_at)  # after the rollback
    whole, module = fit(place, [judge, hold, saver], max_steps=STEPS)
    rest, again = fit(place, held=f"{folder}/at", max_steps=STEPS)
    micro = len(again.seen) // (STEPS - save_at)
    return {
        "losses": (whole.losses, rest.losses),
        "parameters": (whole.parameters, rest.parameters),
        "seen": (module.seen[-len(again.seen) :], again.seen),
        "skipped": again.trainer.fit_loop.skipped,
        "steps": len(again.seen) / micro,
    }


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "save_at"), [("zero3", 3), ("single", 5)])  # before and after the skipped samples
def test_resume_with_skipped_samples(ranks, tmp_path, place, save_at):
    for result in ranks(skip_and_resume, PLACES[place][2], place, str(tmp_path), save_at):
        expected, found = result["losses"]
        assert found == {step: expected[step] for step in range(save_at + 1, STEPS + 1)}
        assert result["seen"][0] == result["seen"][1]
        assert [(each.epoch, each.first, each.last) for each in result["skipped"]] == [(0, 3, 4)]
        assert all(torch.equal(result["parameters"][1][name], value) for name, value in result["parameters"][0].items())


class Weights(pl.Callback):
    """Weights and learning rate after every micro-batch."""

    sees_parts = True  # it reads this rank's tensors

    def __init__(self) -> None:
        self.after: list[tuple[int, float, dict[str, Tensor]]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        optimizer = trainer.optimizers[0].state_dict()["state"]
        states = {
            f"{k}.{name}": local_tensor(value).clone() for k, of in optimizer.items() for name, value in of.items()
        }
        self.after.append((trainer.global_step, rate, {**dict(trainer.strategy.whole_parameters()), **states}))


def drop(place: str, at: int, **options: Any) -> Any:
    weights = Weights()
    _, module = fit(place, max_steps=STEPS)
    _, again = fit(place, [Judge(at, DropStep), weights], max_steps=STEPS, **options)
    batches, parts = again.trainer.accumulate_grad_batches, len(module.seen) // STEPS
    return {
        "before": weights.after[(at - 1) * batches - 1],
        "after": weights.after[at * batches - 1],
        "then": weights.after[(at + 1) * batches - 1],
        "steps": (steps_of(module.seen, parts), steps_of(again.seen, parts)),
        "skipped": again.trainer.fit_loop.skipped,
        "stepped": again.trainer.fit_loop.epoch_loop._batches_that_stepped,
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize(("place", "options"), [
    ("single", {}), ("ddp", {}), ("zero2", {}), ("zero3", {}), ("pipeline x shard", {}),
    ("single", {"profiler": "simple"}), ("single", {"precision": "16-mixed"}), ("zero3", {"precision": "16-mixed"}),
])  # fmt: skip
def test_drop_step(ranks, place, options):
    for result in ranks(drop, PLACES[place][2], place, 4, **options):
        before, after, then = result["before"], result["after"], result["then"]
        assert before[:2] == after[:2]  # number of the step, learning rate
        assert before[2].keys() == after[2].keys()
        assert all(torch.equal(after[2][name], value) for name, value in before[2].items())
        assert then[0] == after[0] + 1
        assert not all(torch.equal(then[2][name], value) for name, value in after[2].items())
        expected, found = result["steps"]
        assert found[:5] == expected[:5]  # the samples of the dropped step are not repeated
        assert len(found) == STEPS + 1
        assert [(each.epoch, each.first, each.last) for each in result["skipped"]] == [(0, 3, 4)]
        assert result["stepped"] == STEPS
