"""Shares of the global batch: arithmetic, decisions, and refused options."""

import itertools
import re
from collections import Counter
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch.utils.data import RandomSampler

from trainwright.core.layout import Layout
from trainwright.strategies.compose.world import options_of
from trainwright.trainer.balance.check import balance_problems
from trainwright.trainer.balance.options import BalanceOptions, balance_option_problems, balance_options
from trainwright.trainer.balance.shares import Bounds, ShareSchedule, divide, pays_off, seconds_of_wave
from trainwright.trainer.data.data_order import RankBatchSampler, Resumed
from trainwright.trainer.data.epoch_order import EpochOrder

ANY = Bounds()


@pytest.mark.parametrize(("samples", "seconds", "sizes"), [
    (96, [1, 1, 4], [43, 43, 10]),  # 43 s: with [42, 42, 12] the slow rank takes 48
    (96, [1, 1, 1], [32, 32, 32]),
    (8, [1 / 3, 1], [6, 2]),
    (5, [1, 1, 1], [2, 2, 1]),
    (3, [9, 1, 1], [1, 1, 1]),
    (2, [9, 1, 1], [0, 1, 1]),
    (1, [1, 1], [1, 0]),
    (0, [1, 1], [0, 0]),
])  # fmt: skip
def test_divide_minimizes_time(samples: int, seconds: list[float], sizes: list[int]) -> None:
    assert divide(samples, seconds, ANY) == sizes


SERVERS = "trainwright.strategies.parameter_server.strategy.ParameterServerStrategy"


def test_divide_is_optimal() -> None:
    for seconds in itertools.product((0.5, 1.0, 3.0), repeat=3):
        for samples in range(3, 13):
            cuts = itertools.product(range(1, samples - 1), repeat=2)
            possible = [(a, b, samples - a - b) for a, b in cuts if samples - a - b >= 1]
            best = min(seconds_of_wave(sizes, seconds) for sizes in possible)
            assert seconds_of_wave(divide(samples, seconds, ANY), seconds) == best


def test_divide_with_bounds() -> None:
    assert divide(40, [1, 100], Bounds(0.5, 2.0)) == [30, 10]
    assert divide(40, [1, 100], Bounds(0.0, 1.5)) == [30, 10]
    assert divide(40, [1, 100], Bounds(0.0, 2.0, least_samples=4)) == [36, 4]
    assert divide(6, [1, 100], Bounds(0.0, 2.0, least_samples=4)) == [3, 3]  # too few for both
    assert divide(5, [1, 100], Bounds(1.0, 1.1)) == [3, 2]  # cannot be more even


def test_pays_off() -> None:
    assert not pays_off(200, [1.0, 1.0], [1.0, 1.04], ANY, 0.05)
    assert pays_off(200, [1.0, 1.0], [1.0, 1.04], ANY, 0.01)
    assert not pays_off(200, [1.0, 1.04], [1.0, 1.04], ANY, 0.0)


def test_share_schedule() -> None:
    schedule = ShareSchedule(ANY)
    schedule.start([1, 1])
    schedule.change(0, 5, [1, 3])
    schedule.change(2, 1, [3, 1])

    def sizes_of(epoch: int, wave: int) -> list[int]:
        return [last - first for first, last in itertools.pairwise(schedule.cuts(epoch, wave, 8))]

    sizes = [sizes_of(epoch, wave) for epoch, wave in ((0, 4), (0, 5), (1, 0), (2, 0), (2, 1), (3, 0))]
    assert sizes == [[4, 4], [6, 2], [6, 2], [6, 2], [2, 6], [2, 6]]
    schedule.drop_before(2, 0)
    assert [sizes_of(2, wave) for wave in (0, 1)] == [[6, 2], [2, 6]]
    schedule.change(2, 1, [1, 1])  # replaces a pending change
    assert [sizes_of(2, wave) for wave in (0, 1)] == [[6, 2], [4, 4]]


def samplers(samples: int, micro: int, ranks: int, **options: Any) -> tuple[ShareSchedule, list[RankBatchSampler]]:
    schedule = ShareSchedule(ANY)
    schedule.start([1.0] * ranks)
    order = EpochOrder(RandomSampler(range(samples)), 5)
    return schedule, [
        RankBatchSampler(order, micro, rank, ranks, 2, False, shares=schedule, **options) for rank in range(ranks)
    ]


def waves_of(dealt: list[RankBatchSampler]) -> list[list[int]]:
    """Return the samples that all ranks read at a time, in order."""
    batches = [list(sampler) for sampler in dealt]
    return [
        [index for mine, sampler in zip(batches, dealt, strict=True) if sampler.count(wave) for index in mine[wave]]
        for wave in range(len(dealt[0]))
    ]


@pytest.mark.parametrize("options", [{}, {"step_samples": 20}])
def test_each_sample_once(options: dict[str, int]) -> None:
    schedule, dealt = samplers(101, 4, 3, **options)
    equal = [RankBatchSampler(dealt[0].sampler, 4, rank, 3, 2, False, **options) for rank in range(3)]
    schedule.change(0, 2, [1, 2, 5])
    schedule.change(0, 5, [5, 1, 1])
    waves, as_ever = waves_of(dealt), waves_of(equal)
    assert waves == as_ever  # all ranks together read the same
    assert Counter(index for wave in waves for index in wave) == Counter(range(101))
    assert [sampler.count(3) for sampler in dealt] != [sampler.count(3) for sampler in equal]
    assert dealt[0].position(5) == equal[0].position(5)
    assert dealt[0].regular_waves == 0


def test_loss_weights_follow_samples() -> None:
    schedule, dealt = samplers(100, 8, 2)
    schedule.change(0, 1, [1, 3])
    for wave in range(len(dealt[0])):
        means = [float(wave + rank) for rank in range(2)]  # of each rank's samples
        counts = [sampler.count(wave) for sampler in dealt]
        exact = sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)
        divided = [mean / sampler.loss_divisor(wave, 1, False) / 2 for mean, sampler in zip(means, dealt, strict=True)]
        assert sum(divided) == pytest.approx(exact)


def test_resume_with_other_shares() -> None:
    schedule, dealt = samplers(60, 4, 3)
    schedule.change(0, 1, [1, 2, 5])
    first = [list(itertools.islice(sampler, 2)) for sampler in dealt]
    where = dealt[0].position(2)
    assert [sampler.drawn for sampler in dealt] == [2, 2, 2]
    _, resumed = samplers(60, 3, 2)
    for sampler in resumed:
        sampler.resume(Resumed(0, 4, where["samples"]))
    rest = [list(sampler) for sampler in resumed]
    assert [sampler.drawn for sampler in resumed] == [len(resumed[0])] * 2
    read = Counter(index for mine in (*first, *rest) for batch in mine for index in batch)
    assert read == Counter(range(60))


def test_balance_options() -> None:
    assert balance_options("none") == BalanceOptions()
    assert balance_options("auto") == BalanceOptions("auto")
    assert balance_options([3, 1]) == BalanceOptions("fixed", [3.0, 1.0])
    assert balance_options({"every_steps": 5}) == BalanceOptions("auto", every_steps=5)


@pytest.mark.parametrize(("balance", "said"), [
    (True, "balance=True (allowed: 'none', 'auto', a list of shares"),
    ("automatic", "balance.kind=automatic: unknown; did you mean auto? allowed: none, auto, fixed"),
    ([], "balance.kind=fixed without balance.shares"),
    ([1, 0], "balance.shares[1]=0: must be a finite number above 0"),
    ({"every_steps": 0}, "every_steps=0: must be a whole number of at least 1 (optimizer steps)"),
    ({"smoothing": 1.0}, "smoothing=1.0"),
    ({"least_share": 1.5}, "least_share=1.5"),
    ({"most_share": 1.0}, "most_share=1.0"),
    ({"least_gain": 1.0}, "least_gain=1.0"),
    ({"every": 3}, "balance.every: there is no such option"),
    ({"shares": [1, 2]}, "shares=[1,2] with balance.kind=auto"),
    ({"kind": "fixed"}, "set the shares of data ranks"),
    ({"kind": "fixed", "shares": [1, 2], "every_steps": 3}, "every_steps=3 with balance.kind=fixed"),
    ({"kind": "none", "smoothing": 0.1}, "nothing is measured"),
])  # fmt: skip
def test_options_out_of_range(balance: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        balance_options(balance)


def found(
    layout: Layout,
    least: int = 1,
    micro: int | None = 8,
    launch: Any = None,
    trainer: Any = None,
    strategy: Any = None,
    **given: Any,
) -> list[str]:
    cfg = {
        "balance": {"kind": "auto", **given},
        "strategy": strategy or {"_target_": "trainwright.strategies.data.ddp.DDPStrategy"},
        "micro_batch_size": micro,
        "launch": {"min_devices": None, "recovery": "restart", **(launch or {})},
        "trainer": {"data_partition": "interleave", "use_distributed_sampler": True, **(trainer or {})},
    }
    cfg["balance"].setdefault("shares", None)
    whole = OmegaConf.create(cfg)
    return balance_problems(whole, options_of(whole.strategy), layout, least)


def test_supported() -> None:
    assert found(Layout(replicate=2)) == []
    assert found(Layout(pipeline=2, shard=2), least=2) == []
    assert found(Layout(), kind="none") == []
    assert found(Layout(replicate=2), strategy={"_target_": SERVERS, "consistency": "sync"}) == []
    assert found(Layout(replicate=2), kind="fixed", shares=[3, 1]) == []
    assert balance_option_problems({}) == []


@pytest.mark.parametrize(("given", "said"), [
    ({"layout": Layout()}, "one data rank computes every sample"),
    ({"layout": Layout(pipeline=2)}, "one data rank computes every sample"),
    ({"layout": Layout(shard=2, expert=2)}, "balance=auto with expert=2"),
    ({"micro": 1}, "type micro_batch_size=2 or more"),
    ({"micro": 4, "least": 4}, "type micro_batch_size=5 or more"),
    ({"kind": "fixed", "shares": [1, 2, 3]}, "balance.shares has 3 number(s)"),
    ({"trainer": {"data_partition": "hash"}}, "type balance=none, or trainer.data_partition=interleave"),
    ({"trainer": {"use_distributed_sampler": False}}, "trainer.use_distributed_sampler=false"),
    ({"kind": "fixed", "shares": [1, 2], "launch": {"min_devices": 1}}, "launch.min_devices: ranks may come and go"),
    ({"kind": "fixed", "shares": [1, 2], "launch": {"recovery": "replicas"}}, "type balance=auto"),
    ({"every_steps": 0}, "balance.every_steps=0"),
    ({"strategy": {"_target_": SERVERS, "consistency": "ssp"}}, "do not make every step"),
])  # fmt: skip
def test_unsupported(given: dict[str, Any], said: str) -> None:
    [problem] = found(**{"layout": Layout(replicate=2), **given})
    assert said in problem
