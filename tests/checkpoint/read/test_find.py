import os
import uuid

import fsspec
import pytest

from tests.checkpoint import small
from trainwright.checkpoint.read.candidates import newest_good
from trainwright.checkpoint.read.find import list_checkpoints
from trainwright.checkpoint.store.paths import join_path
from trainwright.core.errors import CheckpointError


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    if request.param == "local":
        yield str(tmp_path)
        return
    name = f"/{uuid.uuid4().hex}"
    yield f"memory:/{name}"
    store = fsspec.filesystem("memory")
    if store.exists(name):
        store.rm(name, recursive=True)


def cut(path):
    """Take half of a file."""
    store, root = fsspec.core.url_to_fs(path)
    data = store.cat_file(root)
    store.pipe_file(root, data[: len(data) // 2])


def test_sorted_by_step(folder):
    for name, step in (("z", 1), ("a", 3), ("m", 20)):
        small.write(join_path(folder, name), step)
    assert [found.step for found in list_checkpoints(folder)] == [20, 3, 1]
    assert newest_good([folder]) == (join_path(folder, "m"), [])


def test_sorted_by_time_within_a_step(folder):
    assert list_checkpoints(join_path(folder, "none")) == []
    assert newest_good([join_path(folder, "none")]) == (None, [])
    for name in ("b", "c", "a"):
        small.write(join_path(folder, name), 5)
    assert [os.path.basename(found.path) for found in list_checkpoints(folder)] == ["a", "c", "b"]


def test_damaged_checkpoints_are_skipped(folder):
    for step in (1, 2, 3, 4):
        manifest = small.write(join_path(folder, f"step_{step}"), step)
    cut(join_path(folder, f"step_4/{manifest.files['rank_00001.safetensors'].file}"))
    cut(join_path(folder, "step_3/manifest.json"))
    path, (reason, *more) = newest_good([folder])
    assert path == join_path(folder, "step_2")
    assert "rank_00001.safetensors (written by rank 1" in reason
    assert all("manifest.json (written by rank 0)" in text for text in more)


def test_other_entries_are_ignored(tmp_path):
    small.write(tmp_path / "a", 1)
    small.write(tmp_path / ".hidden", 9)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log.txt").write_text("x")
    (tmp_path / "old.ckpt").write_bytes(b"x")
    (tmp_path / "dangling").symlink_to("gone")
    small.write(tmp_path / "lost", 3)
    (tmp_path / "lost" / "manifest.json").unlink()
    assert [found.step for found in list_checkpoints(tmp_path)] == [1]


def test_links_count_once(tmp_path):
    small.write(tmp_path / "step_1", 1)
    small.write(tmp_path / "elsewhere" / "step_2", 2)
    (tmp_path / "last.ckpt").symlink_to("step_1")
    (tmp_path / "again").symlink_to("last.ckpt")
    (tmp_path / "linked").symlink_to("elsewhere/step_2")
    assert [found.path for found in list_checkpoints(tmp_path)] == [str(tmp_path / "linked"), str(tmp_path / "step_1")]
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="could not be read"):
        list_checkpoints(tmp_path / "file")
