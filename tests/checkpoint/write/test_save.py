import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainwright.checkpoint.format.manifest import read_manifest
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.read.run_state import RunState, StoredTensor
from trainwright.checkpoint.store import write_errors
from trainwright.checkpoint.store.storage import PendingFolder
from trainwright.checkpoint.write.save import Content, write
from trainwright.core.errors import CheckpointError

ROWS, COLUMNS = 7, 5


def group() -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def matrix(step: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + step


def content_of(step: int) -> Content:
    """Rows split over the ranks, something that all hold, and something of each rank's own."""
    rank, size = rank_and_size()
    first, last = (ROWS * i // size for i in (rank, rank + 1))
    rows = matrix(step)[first:last]
    tensors = {
        "split": TensorParts((ROWS, COLUMNS), torch.float32, [((first, 0), rows)]),
        "everywhere": TensorParts.whole(torch.full((3,), float(step), dtype=torch.bfloat16)),
        "scalar": TensorParts.whole(torch.tensor(step)),
        "empty": TensorParts.whole(torch.empty(0, 4)),
        f"rank/{rank}/own": TensorParts.whole(torch.tensor([rank])),
    }
    tree = {"step": step, "nested": {"tensor": {"~": "tensor", "key": "everywhere"}}}
    return Content(tree, tensors, {"step": step, "world_size": size})


def save_step(step: int, path: str) -> int | None:
    published = write(content_of(step), path, group())
    return None if published is None else len(published.files)


def check_content(state: RunState, size: int) -> None:
    """Check all values of :func:`content_of` step 4, whole and in boxes."""
    assert state.about["step"] == 4
    assert torch.equal(state.read("split"), matrix(4))
    for offsets, sizes in (((1, 2), (5, 3)), ((6, 0), (1, 5)), ((0, 4), (7, 1)), ((2, 2), (0, 1))):
        box = matrix(4)[offsets[0] : offsets[0] + sizes[0], offsets[1] : offsets[1] + sizes[1]]
        assert torch.equal(state.read("split", offsets, sizes), box)
    assert state.read("everywhere").tolist() == [4, 4, 4]
    assert (state.dtype("everywhere"), state.read("scalar").item()) == (torch.bfloat16, 4)
    assert (state.shape("empty"), state.read("empty").shape) == ((0, 4), (0, 4))
    assert [state.read(f"rank/{rank}/own").item() for rank in range(size)] == list(range(size))
    stored = state.tree["nested"]["tensor"]
    assert isinstance(stored, StoredTensor)
    assert stored.whole().tolist() == [4, 4, 4]


@pytest.mark.parametrize("size", [1, 3])
def test_each_rank_writes_a_file_and_any_box_can_be_read(ranks, tmp_path, size):
    path = str(tmp_path / "checkpoint")
    counts = ranks(save_step, size, 4, path, init_group=size > 1)
    assert counts == [2 + size, *[None] * (size - 1)]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint"]
    state = RunState.open(path)
    assert state.about["bytes"] == sum(record.size for record in state.manifest.files.values())
    assert len(state.stored["everywhere"].boxes) == 1  # replicated tensors are written once
    check_content(state, size)


def test_reading_converts_dtypes(tmp_path):
    write(content_of(2), str(tmp_path / "x"))
    target = torch.empty(2, COLUMNS, dtype=torch.float64)
    parts = TensorParts((ROWS, COLUMNS), torch.float64, [((3, 0), target)])
    RunState.open(str(tmp_path / "x")).fill({"split": parts})
    assert torch.equal(target, matrix(2)[3:5].double())


@pytest.mark.parametrize(
    ("key", "shape", "text"), [("missing", (2,), "holds nothing"), ("split", (5, 7), r"holds \(7, 5\)")]
)
def test_missing_tensors_and_wrong_shapes(tmp_path, key, shape, text):
    write(content_of(2), str(tmp_path / "x"))
    with pytest.raises(CheckpointError, match=text):
        RunState.open(str(tmp_path / "x")).fill({key: TensorParts.whole(torch.empty(shape))})


class Unreadable(torch.Tensor):
    """A tensor whose bytes cannot be had."""

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "Input/output error")

    def contiguous(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "Input/output error")


def fail_on(bad: int, path: str) -> str:
    write(content_of(1), path, group())
    content = content_of(2)
    if rank_and_size()[0] == bad:
        own = content.tensors[f"rank/{bad}/own"]
        own.parts = [(offsets, tensor.as_subclass(Unreadable)) for offsets, tensor in own.parts]
    with pytest.raises(CheckpointError) as error:
        write(content, path, group())
    return str(error.value)


@pytest.mark.parametrize("bad", [0, 2])
def test_failure_of_one_rank_fails_all_and_keeps_the_old_checkpoint(ranks, tmp_path, bad):
    for message in ranks(fail_on, 3, bad, str(tmp_path / "checkpoint")):
        assert f"rank {bad}" in message
        assert "Input/output error" in message
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert torch.equal(RunState.open(str(tmp_path / "checkpoint")).read("split"), matrix(1))


def fail_to_begin(path: str) -> str:
    with pytest.raises(CheckpointError) as error:
        write(content_of(2), path, group())
    return str(error.value)


def test_unwritable_folder_fails_all_ranks(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    for message in ranks(fail_to_begin, 2, str(tmp_path / "file/checkpoint")):
        assert "file" in message


def test_full_disk_is_known_beforehand(tmp_path, monkeypatch):
    monkeypatch.setattr(write_errors, "free_bytes", lambda path: 100)
    with pytest.raises(CheckpointError, match=r"do not fit into .* of free space"):
        write(content_of(1), str(tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []


def test_remote_folder(tmp_path):
    path = f"memory://{tmp_path.name}/checkpoint"
    for step in (1, 4):
        write(content_of(step), path)
    check_content(RunState.open(path), 1)


def rewritten(path: Path, old: bytes, new: bytes) -> None:
    """Change ``tensors.json`` and forge a matching manifest."""
    manifest = read_manifest(path)
    pending = PendingFolder.create(path)
    files = {}
    for name in manifest.files:
        data = (path / name).read_bytes()
        files[name] = pending.write_file(name, data.replace(old, new) if name == "tensors.json" else data, 0)
    pending.publish(type(manifest)(files, manifest.about))


@pytest.mark.parametrize(("old", "new", "text"), [
    (b'"rank_00000.safetensors"', b'"../../etc/passwd"', "which the manifest does not list"),
    (b"[[[0,0],[7,5]", b"[[[0,0],[9,5]", "cannot have a box"),
    (b"[[[0,0],[7,5]", b"[[[0,0],[6,5]", "30 of its 35 elements"),
    (b'"float32"', b'"load"', "is malformed"),
    (b'"boxes"', b'"boxen"', "is malformed"),
])  # fmt: skip
def test_metadata_is_not_trusted(tmp_path, old, new, text):
    write(content_of(1), str(tmp_path / "x"))
    rewritten(tmp_path / "x", old, new)
    with pytest.raises(CheckpointError, match=text):
        RunState.open(str(tmp_path / "x")).read("split")
