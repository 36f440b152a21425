import os

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.write.test_save import group as new_group
from tests.checkpoint.write.test_save import rank_and_size
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.memory import replicas
from trainwright.checkpoint.memory.replicas import NeighbourCopies, pack
from trainwright.checkpoint.memory.snapshots import SnapshotReader
from trainwright.checkpoint.write.save import Content
from trainwright.core.errors import CheckpointError


def rank():
    return rank_and_size()[0]


def apart(distance: int) -> NeighbourCopies:
    """Copies between ranks of nodes with ``distance`` ranks each."""
    os.environ["LOCAL_WORLD_SIZE"] = str(distance)
    return NeighbourCopies(new_group)


def content(step: int) -> Content:
    """Another one on every rank at every step, of another size on every rank."""
    generator = torch.Generator().manual_seed(100 * step + rank())
    table = torch.randn(4 + rank(), 6, generator=generator)
    tensors = {
        "weights/a": TensorParts((20, 6), torch.float32, [((0, 0), table[:2]), ((6, 0), table[2:])]),
        "weights/half": TensorParts.whole(torch.randn(7, generator=generator).bfloat16()),
        "weights/none": TensorParts.whole(torch.empty(0, 3)),
        f"rank/{rank()}/rng": TensorParts.whole(torch.tensor([rank(), step])),
    }
    return Content({"step": step, "rank": rank(), "text": "ü"}, tensors, {"step": step})


def assert_is(held, step):
    expected = content(step)
    assert held is not None
    assert held.step == step
    assert held.content.tree == expected.tree
    assert held.content.about == expected.about
    target = content(step + 50)
    SnapshotReader(held).fill(target.tensors)
    for key, parts in expected.tensors.items():
        for offsets, box in parts.parts:
            assert torch.equal(target.tensors[key].part_at(offsets), box), key


def lose(copies: NeighbourCopies) -> NeighbourCopies:
    """What a rank has that was started anew: nothing but its place in the group."""
    fresh = NeighbourCopies(lambda: None)
    fresh._ring = copies._ring
    return fresh


def lose_and_restore(distance, losers, steps):
    copies = apart(distance)
    for step in steps:
        state = content(step)
        copies.save(state, step)
        for parts in state.tensors.values():  # training continues
            for _, box in parts.parts:
                box.zero_()
    copies.wait()
    if rank() in losers:
        copies = lose(copies)
    held = copies.restore()
    assert_is(held, steps[-1])
    # What was restored is saved again and lost again, elsewhere.
    copies.save(content(steps[-1] + 1), steps[-1] + 1)
    copies.wait()
    if rank() not in losers:
        copies = lose(copies)
    held = copies.restore()
    if dist.get_world_size() == 2:  # one rank alone is lost now
        assert_is(held, steps[-1] + 1)
    return None if held is None else held.step


@pytest.mark.parametrize(("world_size", "loser", "then"), [(2, 1, 11), (3, 0, None)])
def test_lost_rank_is_restored(ranks, world_size, loser, then):
    assert ranks(lose_and_restore, world_size, 1, (loser,), [8, 9, 10]) == [then] * world_size


def test_nothing_to_restore(ranks):
    # Rank 0 keeps the copy of rank 1: both copies of rank 1 are lost.
    assert ranks(restore_nothing, 3, 2, (0, 1)) == [None] * 3


def restore_nothing(distance, losers):
    copies = apart(distance)
    copies.save(content(5), 5)
    copies.wait()
    if rank() in losers:
        copies = lose(copies)
    return copies.restore()


def disown():
    copies = apart(1)
    for step in (1, 2):
        copies.save(content(step), step)
    copies.wait()
    held = copies.restore(have=rank() != 2)
    assert_is(held, 2)


def test_restore_without_own_copy(ranks):
    ranks(disown, 3)


def interrupt(moment):
    copies = apart(1)
    for step in (1, 2):
        copies.save(content(step), step)
    copies.wait()
    if rank() == 1:
        break_at(copies, moment)
    copies.save(content(3), 3)
    with pytest.raises(CheckpointError, match="the previous one is complete"):
        copies.wait()
    mend(copies)
    assert_is(copies.restore(have=rank() != 0), 2)
    # The next ones work again, and the one that all fell back to is not overwritten before it is replaced.
    copies.save(content(3), 3)
    copies.wait()
    assert_is(copies.restore(have=rank() != 1), 3)


def break_at(copies, moment):
    def fail(*args):
        raise MemoryError("no memory")

    if moment == "copying":
        for generation in copies._generations:
            generation.staging.stage = fail
    elif moment == "packing":
        replicas.pack = fail
    else:
        for generation in copies._generations:
            generation.arena.reserve = fail


def mend(copies):
    replicas.pack = pack
    for generation in copies._generations:
        vars(generation.staging).pop("stage", None)
        vars(generation.arena).pop("reserve", None)


@pytest.mark.parametrize("moment", ["copying", "packing", "receiving"])
def test_interrupted_copy_keeps_the_previous_one(ranks, moment):
    ranks(interrupt, 3, moment)


def test_single_process():
    copies = NeighbourCopies(new_group)
    assert copies.restore() is None
    for step in (1, 2, 3):
        copies.save(content(step), step)
    copies.wait()
    assert copies.steps() == [3, 2]
    held = copies.restore()
    assert_is(held, 3)
    target = {"weights/a": TensorParts((20, 6), torch.float32, [((1, 0), torch.zeros(2, 6))])}
    with pytest.raises(CheckpointError, match=r"holds 6 of the 12 elements of weights/a at \(1, 0\)"):
        SnapshotReader(held).fill(target)
    copies.release()
    assert copies.num_bytes == 0
    assert copies.restore() is None


def distance_of(local):
    return apart(local)._connect().distance


@pytest.mark.parametrize(("local", "distance"), [(2, 2), (4, 1), (1, 1)])
def test_keeper_is_on_another_node(ranks, local, distance):
    assert ranks(distance_of, 4, local) == [distance] * 4
