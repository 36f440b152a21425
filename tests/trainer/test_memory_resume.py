"""`fit(ckpt_path=<in-memory state>)` with a new Trainer and a new module in the same process."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.trainer.memory_harness import PLACES, Hold, Model, fit, meet_anew
from trainwright.callbacks.save.run_state import RunStateCheckpoint
from trainwright.core.errors import CheckpointError

HELD_AT, STEPS = 3, 7


def go_on(place: str, spoil: float, **options: Any) -> dict[str, Any]:
    """Train in one run, and resumed from the middle with a new Trainer and module."""
    hold = Hold(HELD_AT)
    whole, module = fit(place, [hold], Model(**options), max_steps=STEPS)
    other = Model(**options)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(spoil)
    rest, again = fit(place, module=other, held=hold.snapshots.newest(), max_steps=STEPS)
    micro = len(module.seen) // STEPS
    return {
        "losses": (whole.losses, rest.losses),
        "seen": (module.seen[HELD_AT * micro :], again.seen),
        "parameters": (whole.parameters, rest.parameters),
        "buffers": [dict(each.named_buffers()) for each in (module, again)],
    }


def check_equal(result: dict[str, Any]) -> None:
    expected, found = result["losses"]
    assert sorted(found) == list(range(HELD_AT + 1, STEPS + 1))
    assert found == {step: expected[step] for step in found}
    assert result["seen"][0] == result["seen"][1]
    for kind in ("parameters", "buffers"):
        expected, found = result[kind]
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", PLACES)
def test_resume_is_exact(ranks, place):
    for result in ranks(go_on, PLACES[place][2], place, 0.3):
        check_equal(result)


@pytest.mark.parametrize("place", ["single", "ddp"])
def test_buffers_of_each_rank(ranks, place):
    results = ranks(go_on, PLACES[place][2], place, 0.3, statistics=True)
    for result in results:
        check_equal(result)
    means = [result["buffers"][1]["norm.running_mean"] for result in results]
    assert all(torch.equal(mean, means[0]) for mean in means)


def lose_one(folder: str, members: list[int]) -> dict[int, float]:
    rank, hold = dist.get_rank(), Hold(HELD_AT)
    fit("ddp", [hold], Model(dropout=0.0), max_steps=HELD_AT + 1)
    if not meet_anew(folder, members, rank):
        return {}
    recorder, _ = fit("ddp", module=Model(dropout=0.0), held=hold.snapshots.newest(), max_steps=STEPS)
    return recorder.losses


def train(place: str) -> dict[int, float]:
    return fit(place, module=Model(dropout=0.0), max_steps=STEPS)[0].losses


@pytest.mark.parametrize("members", [[0, 1], [1, 2]])
def test_fewer_replicas(ranks, tmp_path, members):
    [expected] = ranks(train, 1, "single")
    for rank, losses in enumerate(ranks(lose_one, 3, str(tmp_path), members)):
        assert sorted(losses) == (list(range(HELD_AT + 1, STEPS + 1)) if rank in members else [])
        assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-5)


def go_on_elsewhere() -> str:
    hold = Hold(HELD_AT)
    fit("zero3", [hold], max_steps=HELD_AT)
    with pytest.raises(CheckpointError) as caught:
        fit("ddp", held=hold.snapshots.newest())
    return str(caught.value)


def test_wrong_layout(ranks):
    for message in ranks(go_on_elsewhere, 2):
        assert message.startswith(f"The copy in memory of step {HELD_AT} holds ")
        assert "resume from a checkpoint on disk" in message


class Editing(Model):
    """Reads all weights before they are loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        self.looked = {name: tuple(value.shape) for name, value in weights.items() if value.isfinite().all()}


def edit(place: str) -> tuple[dict[int, float], dict[int, float], dict[str, Any], dict[str, Any]]:
    hold = Hold(HELD_AT)
    whole, _ = fit(place, [hold], max_steps=STEPS)
    module = Editing()
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    rest, _ = fit(place, module=module, held=hold.snapshots.newest(), max_steps=STEPS)
    return {step: whole.losses[step] for step in rest.losses}, rest.losses, shapes, module.looked


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["zero3", "pipeline x shard"])
def test_on_load_checkpoint_sees_whole_weights(ranks, place):
    for expected, found, shapes, looked in ranks(edit, PLACES[place][2], place):
        assert found == expected
        assert looked == shapes


def said_of_later_ones(folder: str) -> list[str]:
    hold = Hold(HELD_AT)
    given = {"max_steps": STEPS, "enable_checkpointing": True}
    fit("single", [hold, RunStateCheckpoint(folder, every_n_steps=2)], **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saver = RunStateCheckpoint(folder, every_n_steps=2)
        fit("single", [saver], held=hold.snapshots.newest(), **given)
    return [str(each.message) for each in caught if "later steps" in str(each.message)]


def test_no_warning_for_repeated_checkpoints(ranks, tmp_path):
    assert ranks(said_of_later_ones, 1, str(tmp_path / "saved")) == [[]]
