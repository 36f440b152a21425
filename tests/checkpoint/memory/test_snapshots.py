import pytest
import torch

from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.format.tree import encode, reference
from trainwright.checkpoint.memory.snapshots import Snapshot, SnapshotReader, Snapshots
from trainwright.checkpoint.write.save import Content
from trainwright.core.errors import CheckpointError


def content(step: int) -> Content:
    """Rows 2 to 4 and 7 to 9 of a table of 10, and a vector."""
    table = torch.arange(40.0).view(10, 4) + 100 * step
    tensors = {
        "weights/table": TensorParts((10, 4), torch.float32, [((2, 0), table[2:5]), ((7, 0), table[7:])]),
        "weights/vector": TensorParts.whole(torch.tensor([step, step + 1])),
        "rank/3/torch": TensorParts.whole(torch.tensor([1])),
    }
    tree = {"step": encode(step, lambda *_: ""), "vector": reference("weights/vector"), "odd": reference("weights/odd")}
    return Content(tree, tensors, {"step": step})


def first(held: Snapshot) -> int:
    return int(held.content.tensors["weights/vector"].parts[0][1][0])


def test_ring_buffer_reuses_memory():
    with pytest.raises(ValueError, match=r"Snapshots\(keep=0\) \(allowed: 1 or more\)"):
        Snapshots(keep=0)
    snapshots = Snapshots(keep=2)
    assert snapshots.newest() is snapshots.oldest() is None
    sizes = []
    for step in range(1, 6):
        taken = content(step)
        snapshots.take(taken, step)
        taken.tensors["weights/vector"].parts[0][1].zero_()  # training continues
        sizes.append(snapshots.num_bytes)
    assert snapshots.steps() == [5, 4]
    assert sizes[1:] == [sizes[1]] * 4
    assert (first(snapshots.newest()), first(snapshots.oldest())) == (5, 4)
    assert snapshots.newest(before_or_at=4).step == 4
    assert snapshots.newest(before_or_at=3) is None


def test_rolling_back():
    snapshots = Snapshots(keep=3)
    for step in (2, 4, 6):
        snapshots.take(content(step), step)
    snapshots.forget_after(4)
    assert snapshots.steps() == [4, 2]
    snapshots.take(content(40), 4)  # made again: replaces the one of that step, not the oldest
    assert snapshots.steps() == [4, 2]
    assert first(snapshots.newest()) == 40
    snapshots.release()
    assert (snapshots.steps(), snapshots.num_bytes) == ([], 0)


def test_failed_copy_leaves_no_snapshot(monkeypatch):
    snapshots = Snapshots(keep=1)
    snapshots.take(content(1), 1)
    monkeypatch.setattr("trainwright.checkpoint.write.staging._copy", fail)
    with pytest.raises(MemoryError):
        snapshots.take(content(2), 2)
    assert snapshots.steps() == []


def fail(*_: object) -> None:
    raise MemoryError


def test_reading():
    source = SnapshotReader(Snapshot(7, content(7)))
    assert source.tree["step"] == 7
    assert source.tree["vector"].whole().tolist() == [7, 8]
    assert (source.shape("weights/table"), source.dtype("weights/vector")) == ((10, 4), torch.int64)
    expected = torch.arange(40.0).view(10, 4) + 700
    assert torch.equal(source.read("weights/table", (3, 1), (2, 2)), expected[3:5, 1:3])
    target = torch.zeros(2, 4, dtype=torch.float64)
    source.fill({"weights/table": TensorParts((10, 4), torch.float64, [((8, 0), target)])})
    assert torch.equal(target, expected[8:].double())
    assert not source.is_whole("weights/table")


@pytest.mark.parametrize("read", [
    lambda source: source.read("weights/table"),
    lambda source: source.read("weights/table", (4, 0), (4, 4)),
    lambda source: source.read("weights/missing"),
    lambda source: source.tree["odd"].whole(),
    lambda source: source.fill({"weights/vector": TensorParts.whole(torch.zeros(3, dtype=torch.int64))}),
])  # fmt: skip
def test_missing_parts_are_refused(read):
    with pytest.raises(CheckpointError, match="(?i)the copy in memory of step 7"):
        read(SnapshotReader(Snapshot(7, content(7))))


def test_joining_parts_of_ranks():
    own, table = content(7), torch.arange(40.0).view(10, 4) + 700
    other = TensorParts((10, 4), torch.float32, [((0, 0), table[:2]), ((5, 0), table[5:7]), ((7, 0), table[7:])])
    source = SnapshotReader(Snapshot(7, own))
    joined = source.joined([source.parts(), {"weights/table": other, "weights/odd": TensorParts.whole(torch.ones(1))}])
    assert torch.equal(joined.read("weights/table"), table)
    assert joined.tree["odd"].whole().tolist() == [1.0]
    assert not any(key.startswith("rank/") for key in source.parts())
