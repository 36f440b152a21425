"""Loss guard with checkpoints on disk: every saved checkpoint is good and can be resumed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.guard.test_loss_guard import Count, Faulty, assert_undisturbed
from tests.trainer.memory_harness import PLACES, Losses, fit
from trainwright import DivergedError, LossGuard, RunStateCheckpoint
from trainwright.checkpoint.read.run_state import RunState

STEPS = 9
SAMPLE = 25  # read in the third step of each of the first two epochs


def guard(policy: str = "rollback", **options: Any) -> LossGuard:
    return LossGuard(policy, **{"snapshot_every_n_steps": 3, "min_history": 2, "threshold": 50.0, **options})


def weights(path: str) -> dict[str, Any]:
    state = RunState.open(path)
    return {key: state.read(key) for key in state.stored if key.startswith(("weights/", "optimizer/"))}


def saved(folder: str) -> dict[int, dict[str, Any]]:
    return {int(path.name.removeprefix("step=")): weights(str(path)) for path in Path(folder).glob("step=*")}


def save_all(place: str, folder: str, asynchronous: bool, faulty: bool) -> tuple[Losses, LossGuard, RunStateCheckpoint]:
    saver = RunStateCheckpoint(folder, every_n_steps=1, keep_last=20, asynchronous=asynchronous)
    watch, module = guard(), Faulty(step=7, rank=PLACES[place][2] - 1) if faulty else Faulty()
    recorder, _ = fit(place, [watch, Count(), saver], module, max_steps=STEPS, enable_checkpointing=True)
    return recorder, watch, saver


def saves_with_and_without(place: str, folder: str, asynchronous: bool) -> Any:
    calm, *_ = save_all(place, f"{folder}/calm", asynchronous, faulty=False)
    went, watch, saver = save_all(place, f"{folder}/went", asynchronous, faulty=True)
    found = {"losses": went.losses, "parameters": went.parameters, "error": None}
    return (calm.losses, calm.parameters), found, watch.counts, saver.last_model_path


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "asynchronous"), [("single", True), ("zero3", False), ("pipeline x shard", True)])
def test_checkpoints_saved_around_a_rollback(ranks, tmp_path, place, asynchronous):
    results = ranks(saves_with_and_without, PLACES[place][2], place, str(tmp_path), asynchronous)
    for expected, found, counts, last in results:
        assert_undisturbed(expected, found)
        assert counts["transient"] == 1
        assert last.endswith(f"step={STEPS}")
    calm, went = saved(f"{tmp_path}/calm"), saved(f"{tmp_path}/went")
    assert sorted(calm) == sorted(went) == list(range(1, STEPS + 1))
    for step, tensors in calm.items():
        assert all(torch.equal(went[step][key], value) for key, value in tensors.items()), step


def stop_and_go_on(place: str, folder: str) -> Any:
    """End a run at a bad sample; resume another run after that sample."""
    saver = RunStateCheckpoint(folder, every=None, keep_last=20)
    module = Faulty(sample=SAMPLE)
    with pytest.raises(DivergedError):
        fit(place, [guard("stop"), Count(), saver], module, max_steps=STEPS, enable_checkpointing=True)
    step, path = module.trainer.global_step, saver.last_model_path
    again = Faulty(sample=SAMPLE)
    with pytest.raises(DivergedError) as stopped:  # in the next epoch
        fit(place, [guard("stop"), Count()], again, held=path, max_steps=STEPS)
    return step, path, again.trainer.global_step, str(stopped.value)


@pytest.mark.parametrize("place", ["single", "ddp"])
def test_a_stopped_run_resumes_after_the_bad_samples(ranks, tmp_path, place):
    for step, path, later, message in ranks(stop_and_go_on, PLACES[place][2], place, str(tmp_path)):
        assert path == f"{tmp_path}/step={step}"
        assert all(tensor.isfinite().all() for tensor in weights(path).values())
        assert (step, later) == (2, 2 + 2 + 2)  # two more steps of this epoch, and two of the next
        assert f"step {later}: " in message


def log_nan(folder: str) -> tuple[float, bool]:
    """A dropped step has logged NaN, and a checkpoint is saved with what was logged last."""
    saver = RunStateCheckpoint(folder, every_n_steps=1, keep_last=20)
    recorder, module = fit(
        "single", [guard("skip"), saver], Faulty(sample=SAMPLE), max_steps=STEPS, enable_checkpointing=True
    )
    good = all(math.isfinite(loss) for loss in recorder.losses.values())
    rest, _ = fit("single", [guard("skip")], Faulty(sample=SAMPLE), held=f"{folder}/step=6", max_steps=STEPS)
    same = {step: recorder.losses[step] for step in rest.losses} == rest.losses
    return module.trainer.global_step, good and same


def test_dropping_beside_checkpoints(ranks, tmp_path):
    assert ranks(log_nan, 1, str(tmp_path)) == [(STEPS, True)]
