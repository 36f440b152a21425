"""Every sample of an epoch is read once, across changing layouts."""

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from trainwright.trainer.data.data_order import RankBatchSampler, Resumed
from trainwright.trainer.data.dealt_batches import DealtBatchSampler
from trainwright.trainer.data.epoch_order import EpochOrder
from trainwright.trainer.data.partition import (
    PARTITIONS,
    HashPartition,
    InQueues,
    RangePartition,
    Read,
    SamplePartition,
    add_read,
    jump_hash,
    resolve_data_key,
    shard_of,
)

EPOCH = 3


@dataclass(frozen=True)
class Turn:
    """Optimizer steps under one layout; fewer if the epoch ends before."""

    ranks: int
    accumulation: int
    micro: int
    steps: int
    partition: str


TURNS = st.builds(
    Turn, st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.sampled_from(PARTITIONS)
)


def partition_of(name: str) -> SamplePartition | None:
    return {"interleave": None, "range": RangePartition(), "hash": HashPartition()}[name]


def samplers_of(turn: Turn, samples: int, shuffle: bool) -> list[RankBatchSampler]:
    found = []
    for rank in range(turn.ranks):
        order = EpochOrder((RandomSampler if shuffle else SequentialSampler)(range(samples)), seed=7)
        order.set_epoch(EPOCH)
        partition = partition_of(turn.partition)
        found.append(RankBatchSampler(order, turn.micro, rank, turn.ranks, turn.accumulation, False, partition))
    return found


def take(turn: Turn, samplers: list[Any], base: int, to_end: bool) -> tuple[list[list[int]], int]:
    """Return the samples of each optimizer step of a turn, without padding, and the number of waves."""
    batches = [list(sampler) for sampler in samplers]
    assert len({len(read) for read in batches}) == 1, "as many waves on every rank"
    assert len(samplers[0]) == base + len(batches[0])
    waves = len(batches[0]) if to_end else min(turn.steps * turn.accumulation, len(batches[0]))
    steps: list[list[int]] = []
    for wave in range(waves):
        if wave % turn.accumulation == 0:
            steps.append([])
        for sampler, read in zip(samplers, batches, strict=True):
            if not sampler.is_padding(base + wave):
                steps[-1] += read[wave]
            assert read[wave], "padding is a batch too"
    return steps, waves


def read_epoch(turns: list[Turn], samples: int, shuffle: bool) -> list[list[int]]:
    """Return the samples of each step, read by changing layouts until the end of the epoch."""
    steps: list[list[int]] = []
    where: dict[str, Any] = {"samples": 0, "history": []}
    for number, turn in enumerate(turns):
        samplers = samplers_of(turn, samples, shuffle)
        base = len(steps) * turn.accumulation
        history = tuple(Read.from_json(read) for read in where["history"])
        for sampler in samplers:
            sampler.resume(Resumed(EPOCH, base, where["samples"], history))
        read, waves = take(turn, samplers, base, to_end=number == len(turns) - 1)
        steps += read
        positions = [sampler.position(base + waves) for sampler in samplers]
        assert all(position == positions[0] for position in positions)
        where = json.loads(json.dumps(positions[0]))
        assert where["samples"] == sum(map(len, steps))
        assert len(where["history"]) <= len(turns)
    return steps


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.lists(TURNS, min_size=1, max_size=5), st.booleans())
def test_changing_layouts_read_each_sample_once(samples, turns, shuffle):
    read = [index for step in read_epoch(turns, samples, shuffle) for index in step]
    assert sorted(read) == list(range(samples))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.lists(TURNS, min_size=2, max_size=4), st.sampled_from(PARTITIONS))
def test_resuming_same_layout_reads_same_steps(samples, turns, partition):
    first = Turn(turns[0].ranks, turns[0].accumulation, turns[0].micro, 0, partition)
    again = [Turn(first.ranks, first.accumulation, first.micro, turn.steps, partition) for turn in turns]
    assert read_epoch(again, samples, shuffle=True) == read_epoch([first], samples, shuffle=True)


@pytest.mark.parametrize("layouts", [[(1, 12, 1), (2, 3, 2), (3, 1, 4), (4, 3, 1)], [(4, 1, 3), (1, 1, 12)]])
def test_equal_steps_under_all_layouts(layouts):
    alone = read_epoch([Turn(1, 1, 12, 0, "interleave")], 103, shuffle=True)
    turns = [Turn(ranks, accumulation, micro, 2, "interleave") for ranks, accumulation, micro in layouts]
    assert read_epoch(turns, 103, shuffle=True) == alone


@pytest.mark.parametrize("partition", ["range", "hash"])
def test_loss_divisor_gives_sample_mean(partition):
    turn = Turn(3, 2, 4, 0, partition)
    samplers = samplers_of(turn, 61, shuffle=True)
    weights: dict[int, float] = {}
    for sampler in samplers:
        for wave, batch in enumerate(sampler):
            divisor = sampler.loss_divisor(wave, turn.accumulation, whole_step=True)
            if wave < sampler.regular_waves:
                assert divisor == turn.accumulation
            for index in batch if divisor != float("inf") else []:
                weights[index] = 1 / divisor / turn.ranks / len(batch)
    for step in take(turn, samplers_of(turn, 61, shuffle=True), 0, to_end=True)[0]:
        assert [weights[index] for index in step] == pytest.approx([1 / len(step)] * len(step))


def test_drop_last():
    for partition in PARTITIONS:
        for rank in range(3):
            order = EpochOrder(SequentialSampler(range(53)), 0)
            sampler = RankBatchSampler(order, 2, rank, 3, 2, True, partition_of(partition))
            assert {len(batch) for batch in sampler} == {2}
            assert len(sampler) % 2 == 0
            assert sampler.regular_waves == len(sampler)


def owners(partition: SamplePartition, samples: int, ranks: int) -> np.ndarray:
    found = np.empty(samples, dtype=int)
    indices = np.arange(samples)
    for rank, queue in enumerate(partition.queues(indices, ranks)):
        found[indices[queue]] = rank
    return found


def test_ranges_are_contiguous_and_shuffled_within():
    indices = np.random.default_rng(0).permutation(103)
    queues = [indices[queue] for queue in RangePartition().queues(indices, 4)]
    bounds = [0, 26, 52, 78, 103]
    assert [sorted(queue) for queue in queues] == [list(range(*pair)) for pair in itertools.pairwise(bounds)]
    assert all(list(queue) != sorted(queue) for queue in queues)


@pytest.mark.parametrize(("before", "after", "ideal"), [(4, 5, 0.2), (8, 7, 0.125)])
def test_hash_moves_few_samples(before, after, ideal):
    partition = HashPartition()
    old, new = owners(partition, 20_000, before), owners(partition, 20_000, after)
    assert np.mean(old != new) == pytest.approx(ideal, abs=0.02)
    for ranks, found in ((before, old), (after, new)):
        sizes = np.bincount(found, minlength=ranks)
        assert sizes.max() / sizes.mean() < 1.15
    # A new rank takes samples from the others and moves none between them; a removed one gives away its own.
    assert set(np.where(before < after, new, old)[old != new]) == {max(before, after) - 1}


def test_hash_is_stable():
    assert [shard_of(key) for key in (0, 12345, "a/b.jpg", b"\x00\xff")] == [2948, 2164, 3431, 1968]
    # Results of other implementations of the paper.
    assert [jump_hash(*each) for each in ((1, 1), (42, 57), (0xDEAD10CC, 666), (256, 1024))] == [0, 43, 361, 520]


def test_data_key():
    partition = HashPartition(lambda index: f"document {index // 10}")
    found = owners(partition, 200, 5).reshape(20, 10)
    assert (found == found[:, :1]).all()
    assert len(set(found[:, 0])) > 1
    with pytest.raises(ValueError, match=r"data_key returned 1\.5, a float; allowed are str, int and bytes"):
        HashPartition(lambda index: 1.5).queues(np.arange(3), 2)


@pytest.mark.parametrize("key", ["json:nothing", "nowhere:at_all", "json", "json:__name__", 3])
def test_resolve_data_key(key):
    assert resolve_data_key("tests.trainer.test_partition:owners") is owners
    with pytest.raises(ValueError, match="data_key="):
        resolve_data_key(key)


def test_non_integer_indices():
    order = EpochOrder(["a", "b"], 0)
    with pytest.raises(ValueError, match="needs a sampler that yields whole numbers"):
        list(RankBatchSampler(order, 1, 0, 1, 1, False, HashPartition()))
    assert list(RankBatchSampler(order, 1, 0, 1, 1, False)) == [["a"], ["b"]]


def test_history_is_merged():
    history: tuple[Read, ...] = ()
    for read in [Read("interleave", 5), Read("interleave", 3), Read("hash", 0, 2, 4, 1), Read("hash", 0, 2, 4, 2)]:
        history = add_read(history, read)
    assert add_read(history, Read("interleave")) == history == (Read("interleave", 8), Read("hash", 0, 2, 4, 3))
    assert add_read(history, Read("hash", 0, 3, 4, 1))[-1] == Read("hash", 0, 3, 4, 1)
    assert [Read.from_json(read.to_json()) for read in history] == list(history)


def test_repeated_indices():
    indices = np.array([3, 3, 3, 1, 1, 0])
    for partition in (RangePartition(), HashPartition()):
        dealing = InQueues(indices, partition, 2, 1, 1, False)
        read = [i for w in range(len(dealing)) for r in range(2) if dealing.count(w, r) for i in dealing.batch(w, r)]
        assert Counter(read) == Counter(indices.tolist())


def sampler_of(samples: int, micro: int = 4) -> RankBatchSampler:
    return RankBatchSampler(EpochOrder(SequentialSampler(range(samples)), 0), micro, 0, 1, 1, False)


def test_resume_cycled_loader():
    read = [index for _ in range(3) for batch in sampler_of(10) for index in batch]
    sampler = sampler_of(10)
    where = sampler.position(5)  # a pass has three batches
    assert where == {"samples": 8, "history": [], "passes": 1}
    resumed = sampler_of(10)
    resumed.resume(Resumed(0, 5, where["samples"], (), where["passes"]))
    assert [i for _ in range(2) for batch in resumed for i in batch] == read[18:]
    assert len(resumed) <= 5, "it must not make the epoch longer"
    assert resumed.position(6) == {"samples": 10, "history": [], "passes": 1}
    assert resumed.position(7) == {"samples": 4, "history": [], "passes": 2}


def test_unread_iterator():
    """A DataLoader with workers creates two iterators of its batch sampler and reads the second."""
    sampler = sampler_of(10)
    sampler.resume(Resumed(0, 1, 4))
    unread = iter(sampler)
    assert [list(sampler) for _ in range(2)] == [[[4, 5, 6, 7], [8, 9]], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]
    del unread


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.integers(1, 5), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1))
def test_dealt_batches(samples, size, turns):
    read: list[int] = []
    for number, (ranks, waves) in enumerate(turns):
        source = BatchSampler(RandomSampler(range(samples)), size, False)
        samplers = [DealtBatchSampler(source, 3, rank, ranks) for rank in range(ranks)]
        for sampler in samplers:
            sampler.resume(Resumed(0, 2, len(read)))
        batches = [list(sampler) for sampler in samplers]
        waves = len(batches[0]) if number == len(turns) - 1 else min(waves, len(batches[0]))
        for wave in range(waves):
            for sampler, own in zip(samplers, batches, strict=True):
                read += [] if sampler.is_padding(2 + wave) else own[wave]
        assert samplers[0].position(2 + waves)["samples"] == len(read)
    assert sorted(read) == list(range(samples))


def test_dealt_batches_with_other_boundaries():
    sampler = DealtBatchSampler([[0, 1], [2, 3, 4], [5]], 0, 0, 1)
    sampler.resume(Resumed(0, 0, 3))
    with pytest.raises(ValueError, match="ends batches after 2 and 5 samples"):
        len(sampler)


def test_resume_with_saved_seed():
    def order(seed: int) -> EpochOrder:
        return EpochOrder(RandomSampler(range(20)), seed)

    old, sampler = order(1), RankBatchSampler(order(2), 20, 0, 1, 1, False)
    sampler.resume(Resumed(0, 1, 5, seed=1))
    assert list(sampler) == [list(old.indices())[5:]]
    sampler.sampler.set_epoch(1)
    later = order(2)
    later.set_epoch(1)
    assert list(sampler) == [list(later.indices())]


def test_sampler_with_own_generator():
    def draws() -> list[list[int]]:
        generator = torch.Generator().manual_seed(4)
        order = EpochOrder(WeightedRandomSampler(torch.ones(9), 9, generator=generator), 0)
        found = []
        for epoch in (2, 0, 2):
            order.set_epoch(epoch)
            found.append(list(order.indices()))
        assert order.order_seed == 4
        return found

    first, again = draws(), draws()
    assert first == again
    assert first[0] == first[2] != first[1]
