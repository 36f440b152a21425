"""Arithmetic of the global batch and of the waves in which it is read."""

import itertools
import re

import pytest

from trainwright.core.global_batch import GlobalBatch, Waves, solve_accumulation
from trainwright.trainer.data.data_order import RankBatchSampler
from trainwright.trainer.data.epoch_order import EpochOrder


def test_accumulation_follows():
    assert solve_accumulation(64, 8, 2) == 4
    assert solve_accumulation(16, 8, 2) == 1
    assert GlobalBatch(8, 4, 2).size == 64


@pytest.mark.parametrize(("size", "micro", "ranks", "told"), [
    (20, 8, 2, "Nearest possible: global_batch_size=16 or 32. Or keep it and set micro_batch_size=1 or 2 or 5 or 10"),
    (8, 8, 2, "Nearest possible: global_batch_size=16. Or keep it and set micro_batch_size=1 or 2 or 4"),
    (9, 2, 2, "Nearest possible: global_batch_size=8 or 12."),
])  # fmt: skip
def test_impossible_size_suggests_the_nearest(size, micro, ranks, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        solve_accumulation(size, micro, ranks)


SAMPLES, MICRO, RANKS, GROUPS = [1, 3, 7, 16, 23, 32, 41], [1, 2, 4], [1, 2, 3, 8], [0, 1, 2, 3]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_sample_is_dealt_once_in_order(ranks, group):
    for samples, micro in itertools.product(SAMPLES, MICRO):
        check_dealing(samples, micro, ranks, group)


def check_dealing(samples, micro, ranks, group):
    waves = Waves(samples, micro, ranks, group)
    dealt = [waves.share(wave, rank) for wave in range(len(waves)) for rank in range(ranks)]
    assert [i for first, last in dealt for i in range(first, last)] == list(range(samples))
    assert all(last - first <= micro for first, last in dealt)
    if group:
        # An optimizer step reads the same samples under every layout.
        size = group * micro * ranks
        for wave in range(len(waves)):
            first, last = waves.bounds(wave)
            assert first // size == (last - 1) // size


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_evaluation_deals_the_batches_of_one_process(ranks, drop_last):
    for samples, micro in itertools.product(SAMPLES, MICRO):
        batches = [list(range(i, min(i + micro, samples))) for i in range(0, samples, micro)]
        batches = [batch for batch in batches if len(batch) == micro or not drop_last]
        samplers = [
            RankBatchSampler(_Plain(range(samples), 0), micro, rank, ranks, 0, drop_last) for rank in range(ranks)
        ]
        waves = list(zip(*map(list, samplers), strict=True))
        dealt = [
            part
            for wave, parts in enumerate(waves)
            for part, sampler in zip(parts, samplers, strict=True)
            if not sampler.is_padding(wave)
        ]
        assert dealt == batches


@pytest.mark.parametrize("whole_step", [True, False])
@pytest.mark.parametrize("group", GROUPS[1:])
def test_weights_of_a_step_add_up(group, whole_step):
    for samples, micro, ranks in itertools.product(SAMPLES, MICRO, RANKS):
        check_weights(samples, micro, ranks, group, whole_step)


def check_weights(samples, micro, ranks, group, whole_step):
    accumulation = group
    group = group if whole_step else 1
    order = _Plain(range(samples), 0)
    samplers = [RankBatchSampler(order, micro, rank, ranks, group, drop_last=False) for rank in range(ranks)]
    waves = samplers[0].dealing.waves
    per_sample: dict[int, float] = {}
    for wave in range(len(waves)):
        for rank, sampler in enumerate(samplers):
            first, last = waves.share(wave, rank)
            divisor = sampler.loss_divisor(wave, accumulation, whole_step)
            assert sampler.is_padding(wave) == (first == last) == (divisor == float("inf"))
            if wave < sampler.regular_waves:
                assert divisor == accumulation
            for i in range(first, last):
                per_sample[i] = 1 / divisor / ranks / (last - first)
    assert per_sample.keys() == set(range(samples))
    if whole_step:
        size = accumulation * micro * ranks
        for start in range(0, samples, size):
            step = [per_sample[i] for i in range(start, min(start + size, samples))]
            assert step == pytest.approx([1 / len(step)] * len(step))
    else:
        for wave in range(len(waves)):
            first, last = waves.bounds(wave)
            assert sum(per_sample[i] for i in range(first, last)) == pytest.approx(1 / accumulation)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("size", [5, 8, 12])
def test_uneven_micro_batches(ranks, size):
    for samples, micro in itertools.product(SAMPLES, MICRO):
        group = solve_accumulation(size, micro, ranks, uneven=True)
        step_samples = size if size % (micro * ranks) else 0
        order, given = _Plain(range(samples), 0), {"drop_last": False, "step_samples": step_samples}
        samplers = [RankBatchSampler(order, micro, rank, ranks, group, **given) for rank in range(ranks)]
        waves = samplers[0].dealing.waves
        weights: dict[int, float] = {}
        for wave in range(len(waves)):
            for rank, sampler in enumerate(samplers):
                own = list(range(*waves.share(wave, rank)))
                divisor = sampler.loss_divisor(wave, group, whole_step=True)
                assert sampler.is_padding(wave) == (not own) == (divisor == float("inf"))
                assert len(own) <= micro
                assert {i // size for i in own} <= {wave // group}
                assert not (weights.keys() & set(own))
                weights.update((i, 1 / divisor / ranks / len(own)) for i in own)
        assert sorted(weights) == list(range(samples))
        for start in range(0, samples, size):
            step = [weights[i] for i in range(start, min(start + size, samples))]
            assert step == pytest.approx([1 / len(step)] * len(step))


class _Plain(EpochOrder):
    """An order that needs no sampler object."""

    def __len__(self) -> int:
        return len(self.sampler)


def test_cursor_counts_samples():
    from torch.utils.data import SequentialSampler

    def sampler(micro: int, ranks: int) -> RankBatchSampler:
        return RankBatchSampler(EpochOrder(SequentialSampler(range(48)), 0), micro, 0, ranks, 1, False)

    written = sampler(4, 2)
    written.consumed = lambda: 3
    state = written.state_dict()
    assert state == {"samples": 24, "history": [], "passes": 0}
    read = sampler(2, 3)
    read.load_state_dict(state)
    assert next(iter(read)) == [24, 25]
    assert next(iter(read)) == [0, 1]  # the next epoch begins at the beginning
