import itertools
import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint import small
from trainwright.checkpoint.format.manifest import Manifest
from trainwright.checkpoint.read.candidates import newest_good
from trainwright.checkpoint.read.find import FoundCheckpoint
from trainwright.checkpoint.write.retention import Retention, apply
from trainwright.core.errors import CheckpointError, DamagedCheckpoint


def found(step, **metrics):
    return FoundCheckpoint(f"step_{step}", step, "", Manifest({}, {"step": step, "metrics": metrics}))


def kept(retention, checkpoints):
    doomed = retention.doomed(checkpoints)
    assert doomed == sorted(doomed, key=lambda each: each.order)
    return [each.step for each in checkpoints if each not in doomed]


def test_keep_last():
    checkpoints = [found(step) for step in (4, 1, 3, 2)]
    assert kept(Retention(), checkpoints) == [4]
    assert kept(Retention(keep_last=2), checkpoints) == [4, 3]
    assert kept(Retention(keep_last=9), checkpoints) == [4, 1, 3, 2]
    assert kept(Retention(keep_last=None), checkpoints) == [4, 1, 3, 2]
    assert Retention().doomed([]) == []


def test_keep_every():
    checkpoints = [found(step) for step in (0, 50, 100, 150, 200, 250)]
    assert kept(Retention(keep_every=100), checkpoints) == [100, 200, 250]


def test_keep_best():
    losses = {1: 0.5, 2: 0.1, 3: float("nan"), 4: 0.3, 5: 0.1, 6: 0.9}
    checkpoints = [found(step, loss=loss) for step, loss in losses.items()] + [found(7)]
    assert kept(Retention(keep_best=1, metric="loss"), checkpoints) == [5, 7], "of equal ones the newer"
    assert kept(Retention(keep_best=3, metric="loss"), checkpoints) == [2, 4, 5, 7]
    assert kept(Retention(keep_best=2, metric="loss", mode="max"), checkpoints) == [1, 6, 7]
    assert kept(Retention(keep_best=9, metric="loss"), checkpoints) == [1, 2, 4, 5, 6, 7]
    assert kept(Retention(keep_best=2, metric="other"), checkpoints) == [7]


@given(
    steps=st.lists(st.integers(0, 50), unique=True, min_size=1),
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 9),
)
@settings(max_examples=100, deadline=None)
def test_policies_combined(steps, last, every):
    stays = kept(Retention(keep_last=last, keep_every=every), [found(step) for step in steps])
    newest = sorted(steps)[-last:]
    milestones = [step for step in steps if every and step and step % every == 0]
    assert sorted(stays) == sorted({*newest, *milestones})


@pytest.mark.parametrize(("options", "message"), [
    ({"keep_last": 0}, "keep_last=0: must be a whole number of at least 1, or None to keep all"),
    ({"keep_every": 0}, "keep_every"),
    ({"keep_best": -1}, "keep_best"),
    ({"keep_best": 1}, "needs the name of a logged value"),
    ({"mode": "best"}, "unknown; allowed: min, max"),
])  # fmt: skip
def test_invalid_options(options, message):
    with pytest.raises(ValueError, match=message):
        Retention(**options)


def test_old_checkpoints_are_deleted(tmp_path):
    for step in (1, 2, 3):
        small.write(tmp_path / f"step_{step}", step)
    assert apply(tmp_path, Retention(keep_last=2), tmp_path / "step_3") == [str(tmp_path / "step_1")]
    assert sorted(os.listdir(tmp_path)) == ["step_2", "step_3"]
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        apply(tmp_path, Retention(), tmp_path / "step_4")
    assert small.read(tmp_path / "step_2") == 2


@pytest.mark.parametrize("file", ["rank_00000.safetensors", "state.json", "manifest.json"])
def test_damaged_newest_keeps_all(tmp_path, file):
    for step in (1, 2, 3):
        small.write(tmp_path / f"step_{step}", step)
    data = bytearray((tmp_path / "step_3" / file).read_bytes())
    data[-2] ^= 4
    (tmp_path / "step_3" / file).write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=file):
        apply(tmp_path, Retention(), tmp_path / "step_3")
    assert len(os.listdir(tmp_path)) == 3
    assert small.read(tmp_path / "step_2") == 2


def test_last_written_and_link_targets_stay(tmp_path):
    for step in (100, 200, 50, 110):  # resumed from step 100
        small.write(tmp_path / f"step_{step}", step)
    (tmp_path / "best.ckpt").symlink_to("step_50")
    apply(tmp_path, Retention(), tmp_path / "step_110")
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "step_110", "step_200", "step_50"]
    assert small.read(tmp_path / "best.ckpt") == 50


def test_weights_do_not_replace_run_states(tmp_path):
    small.write(tmp_path / "state", 1)
    manifest = small.write(tmp_path / "weights", 2)
    about = {**manifest.about, "kind": "weights"}
    (tmp_path / "weights" / "manifest.json").write_bytes(Manifest(manifest.files, about).to_bytes())
    assert apply(tmp_path, Retention(), tmp_path / "weights") == []
    assert small.read(tmp_path / "state") == 1


def test_a_good_checkpoint_survives_any_damage(tmp_path):
    """Whichever two of four are damaged, deleting never takes the last good one."""
    for step in range(1, 5):
        small.write(tmp_path / "whole" / f"step_{step}", step)
    for damaged in itertools.combinations(range(1, 5), 2):
        folder = tmp_path / "-".join(map(str, damaged))
        shutil.copytree(tmp_path / "whole", folder)
        for step in damaged:
            with open(folder / f"step_{step}" / "rank_00001.safetensors", "r+b") as file:
                file.truncate(20)
        try:
            apply(folder, Retention(), folder / "step_4")
        except DamagedCheckpoint:
            assert 4 in damaged
        path, _ = newest_good([str(folder)])
        assert small.read(path) == max({1, 2, 3, 4} - {*damaged})
