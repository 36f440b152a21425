"""Assignment of replicated boxes to writing ranks."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainwright.checkpoint.exchange.distinct import any_of_ranks
from trainwright.checkpoint.format.parts import TensorParts
from trainwright.checkpoint.write.assignment import (
    Assignment,
    Box,
    ReplicaGroup,
    WriteAssigner,
    boxes_of,
    choose_writers,
    share_out,
    writers_of_common,
)
from trainwright.checkpoint.write.box_index import stored_by


def box(key: str, size: int, offset: int = 0, whole: int | None = None) -> Box:
    return Box(key, (offset,), (size,), 4 * size, (size if whole is None else whole,))


def test_replicated_boxes_are_balanced() -> None:
    boxes = [box(f"w{index}", size) for index, size in enumerate([100, 90, 50, 40, 10, 10])]
    shares = share_out(boxes, 3)
    assert sorted(shares) == list(range(6))
    loads = Counter[int]()
    for position, rank in shares.items():
        loads[rank] += boxes[position].num_bytes
    assert max(loads.values()) - min(loads.values()) <= 40


def test_boxes_of_one_rank_count_towards_its_load() -> None:
    shared = [box(f"w{index}", 10) for index in range(4)]
    groups = [ReplicaGroup([0], shared), ReplicaGroup([1], [box("alone", 50), *shared])]
    winners = choose_writers(groups)
    assert share_out(groups[0].boxes, 1, 0, winners) == dict.fromkeys(range(4), 0)
    assert share_out(groups[1].boxes, 1, 1, winners) == {0: 0}


def test_boxes_of_one_tensor_are_split() -> None:
    tensors = {"a": TensorParts((4,), torch.float32, [((0,), torch.ones(2)), ((2,), torch.ones(2))])}
    boxes = boxes_of(tensors)
    assert boxes == [box("a", 2, 0, 4), box("a", 2, 2, 4)]
    assert share_out(boxes, 2) == {0: 0, 1: 1}


def test_rank_local_tensors_do_not_split_groups() -> None:
    own = {rank: {f"rank/{rank}/rng": TensorParts.whole(torch.ones(3))} for rank in (0, 7)}
    assert boxes_of(own[0], 0) == boxes_of(own[7], 7)
    other = boxes_of(own[0], 7)  # that of another rank is none of its own
    assert [each.key for each in other] == ["rank/0/rng"]


@pytest.mark.parametrize("replicate", [5, 3_000])
def test_groups_grow_with_shards_not_ranks(replicate: int) -> None:
    lines = [[rank * 4 + shard for rank in range(replicate)] for shard in range(4)]
    held = [
        [*(box(f"w{name}", 2, 2 * shard, 8) for name in range(6)), *(box(f"step{name}", 1) for name in range(6))]
        for shard in range(4)
    ]
    groups = [ReplicaGroup(ranks, [*boxes, box("rank/*/rng", 5)]) for ranks, boxes in zip(lines, held, strict=True)]
    winners = choose_writers(groups)
    assert len(winners) == 6  # of the scalars that all hold
    assignment = Assignment(frozenset(), groups, winners)
    written = [(each.key, each.offsets) for each, _ in assignment.written()]
    assert len(written) == len(set(written)) == 6 * 4 + 6 + 4 * replicate
    stored = stored_by(assignment)
    assert [stored["w0"].boxes[shard].offsets for shard in range(4)] == [(0,), (2,), (4,), (6,)]
    last = 4 * replicate - 1
    assert stored[f"rank/{last}/rng"].boxes[0].file == f"rank_{last:05d}.safetensors"


def test_writers_of_common_boxes() -> None:
    common = [box(f"c{index}", size) for index, size in enumerate([30, 20, 20, 7, 7, 1])]
    groups = [
        ReplicaGroup([3 * place + line for place in range(3)], [*common, box(f"own{line}", 25)]) for line in range(2)
    ]
    winners = choose_writers(groups)
    assert set(winners) == set(common)
    found = writers_of_common(winners, [replicas.ranks for replicas in groups])
    written = dict(Assignment(frozenset(), groups, winners).written())
    assert found == {each: written[each] for each in common}


def assigned_again() -> list[Any]:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo")
    assigner = WriteAssigner(group)
    # Two shards, each on every second rank; something that all hold, and something of each rank's own.
    row = TensorParts((2, 6), torch.float32, [((rank % 2, 0), torch.ones(1, 6))])
    tensors = {f"w{name}": row for name in range(4)}
    tensors |= {"all": TensorParts.whole(torch.ones(2)), f"rank/{rank}/rng": TensorParts.whole(torch.ones(1))}
    found = [sorted(assigner.assign(tensors)) for _ in range(2)]
    first = assigner.last
    del tensors["w0"]
    assigner.assign(tensors if rank == 1 else {**tensors, "w0": row})
    assert assigner.last is not first
    assert any_of_ranks(assigner.last.own != first.own, group)
    return [*found, sorted((each.key, each.offsets, by) for each, by in first.written()), size]


def test_assignment_is_kept_until_boxes_change(ranks: Any) -> None:
    found = ranks(assigned_again, 4)
    kept = Counter(key for first, _, _, _ in found for key in first)
    assert kept == {**{f"w{name}": 2 for name in range(4)}, "all": 1, **{f"rank/{rank}/rng": 1 for rank in range(4)}}
    for rank, (first, again, known, _) in enumerate(found):
        assert first == again
        if rank:
            assert known == []
            continue
        assert sorted(key for key, _, by in known if by == 2) == found[2][0]
        assert len(known) == 8 + 1 + 4
