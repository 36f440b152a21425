"""The arithmetic of advice: exact values, what grows with what, and where the better choice changes."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from trainwright.strategies.contract.communication.advice import (
    ENOUGH,
    MeasuredLink,
    MeasuredStep,
    advise,
    best_bucket_bytes,
    fit_link,
    options_of,
    overlapped,
)

GB, US = 1e9, 1e-6
FAST = MeasuredLink("replicate", 4, 10 * US, 10 * GB)
SLOW = MeasuredLink("replicate", 4, 10 * US, 0.01 * GB)
# 100 MB of gradients, in 4 buckets, and 300 ms of computing.
STEP = MeasuredStep(
    compute=0.3,
    waits=0.0,
    sent={("replicate", "all_reduce"): (4.0, 150e6)},
    gradient_bytes=100e6,
    compressed_bytes={"bf16": 75e6, "int8": 38e6, "powersgd": 4e6, "topk": 6e6, "onebit": 5e6},
)


def exposed(step, *links):
    return {option.name: option.exposed for option in options_of(step, links)}


def test_ring_cost_model():
    # 2 (n - 1) messages, 2 (n - 1) / n of the tensor.
    assert FAST.seconds("all_reduce", 1e9) == pytest.approx(6 * 10e-6 + 1.5e9 / 10e9)
    assert FAST.seconds("all_gather", 1e9) == pytest.approx(3 * 10e-6 + 0.75e9 / 10e9)
    assert FAST.seconds_of(1e6, rounds=1) == pytest.approx(3 * 10e-6 + 1e-4)


@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_fit_link_recovers_latency_and_bandwidth(ranks):
    link, sizes = MeasuredLink("shard", ranks, 25 * US, 3 * GB), (4096.0, 4194304.0)
    found = fit_link(
        "shard", ranks, sizes, (link.seconds("all_reduce", sizes[0]), link.seconds("all_reduce", sizes[1]))
    )
    assert found.latency == pytest.approx(link.latency)
    assert found.bandwidth == pytest.approx(link.bandwidth)


def test_fit_link_with_a_faster_large_tensor():
    found = fit_link("replicate", 2, (4096, 4194304), (2e-3, 1e-3))
    assert (found.latency, found.bandwidth) == (0.5e-3, pytest.approx(4194304 / 1e-3))


def test_exposed_seconds_by_option():
    found = exposed(STEP, SLOW)
    whole = 4 * 6 * 10e-6 + 150e6 / 0.01e9
    assert found["dense"] == pytest.approx(whole - 0.2 * 3 / 4)  # behind backward, two thirds of 300 ms, but its begin
    assert found["bf16"] == pytest.approx(6 * 10e-6 + 75e6 / 0.01e9)  # behind nothing
    assert found["local updates, H=50"] == pytest.approx((6 * 10e-6 + 150e6 / 0.01e9) / 50)
    assert set(found) == {"dense", *STEP.compressed_bytes, "local updates, H=10", "local updates, H=50"}


def test_the_last_piece_is_always_exposed():
    assert overlapped(1.0, 4, window=100.0) == pytest.approx(0.25)
    assert overlapped(1.0, 1, window=100.0) == pytest.approx(1.0), "one piece begins when backward has ended"
    assert overlapped(10.0, 4, window=4.0) == pytest.approx(7.0)


def test_accumulation_shrinks_the_overlap_window():
    shares = [exposed(replace(STEP, accumulation=n), SLOW)["dense"] for n in (1, 2, 4)]
    assert shares == sorted(shares)
    assert shares[0] < shares[2]


@pytest.mark.parametrize("name", ["dense", "bf16", "topk", "local updates, H=10"])
def test_exposed_seconds_are_monotonic(name):
    by_bandwidth = [exposed(STEP, replace(SLOW, bandwidth=b * GB))[name] for b in (0.01, 0.1, 1, 10)]
    by_latency = [exposed(STEP, replace(SLOW, latency=latency))[name] for latency in (1e-2, 1e-3, 1e-5)]
    assert by_bandwidth == sorted(by_bandwidth, reverse=True)
    assert by_latency == sorted(by_latency, reverse=True)
    assert by_bandwidth[0] > by_bandwidth[-1]


def test_recommends_the_mildest_sufficient_option():
    chosen = [advise(STEP, [replace(FAST, bandwidth=b * GB)]).chosen.name for b in (10, 2.7, 1.0, 0.01, 1e-4)]
    assert chosen == ["dense", "dense", "powersgd", "local updates, H=50", "local updates, H=50"]
    between = replace(STEP, compressed_bytes={**STEP.compressed_bytes, "bf16": 10e6})
    assert advise(between, [replace(FAST, bandwidth=1 * GB)]).chosen.name == "bf16", "before powersgd"


def test_latency_alone_makes_compression_useless():
    late = replace(FAST, latency=20e-3)
    advice = advise(STEP, [late])
    assert exposed(STEP, late)["topk"] > ENOUGH * STEP.compute
    assert advice.chosen.name.startswith("local updates")


def test_options_without_overrides_are_not_recommended():
    step = replace(STEP, compressed_bytes={"onebit": 1.0, "fp16": 1.0})
    assert advise(step, [SLOW]).chosen.name.startswith("local updates")


def test_recommends_hierarchical_averaging():
    links = [
        MeasuredLink("replicate", 16, 10 * US, 0.1 * GB),
        MeasuredLink("within", 8, 10 * US, 100 * GB),
        MeasuredLink("across", 2, 10 * US, 0.1 * GB),
    ]
    step = replace(STEP, compressed_bytes={})
    found = {option.name: option for option in options_of(step, links)}
    part = 100e6 / 8
    seconds = 2 * (7 * 10e-6 + 7 / 8 * 100e6 / 100e9) + 2 * 10e-6 + part / 0.1e9
    assert found["hierarchical"].exposed == pytest.approx(max(seconds - 0.2, 0.0))
    advice = advise(step, links)
    assert advice.chosen.to_type == "strategy.average_by=hierarchical"
    assert not advice.chosen.changes_numbers


def test_other_axes_count_for_every_option():
    shard = MeasuredLink("shard", 2, 0.0, 1 * GB)
    busy = replace(STEP, sent={**STEP.sent, ("shard", "all_gather"): (3.0, 1.2e9)})
    before, after = exposed(STEP, FAST, shard), exposed(busy, FAST, shard)
    assert after["topk"] - before["topk"] == pytest.approx(1.2 - STEP.window)
    assert exposed(replace(busy, gradient_bytes=0.0), shard) == {"dense": pytest.approx(1.2 - STEP.window)}


def test_best_bucket_size_is_optimal():
    link, size = MeasuredLink("replicate", 8, 20 * US, 1 * GB), 400e6
    whole = link.seconds("all_reduce", size) - link.seconds("all_reduce", 0)

    def cost(bucket):
        pieces = size / bucket
        return pieces * link.seconds("all_reduce", 0) + whole / pieces

    best = best_bucket_bytes(link, size)
    assert best == pytest.approx(size / math.sqrt(whole / (14 * 20e-6)))
    assert cost(best) <= min(cost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))
    assert best_bucket_bytes(replace(link, latency=1.0), size) == size, "one, where each costs a second"
    assert best_bucket_bytes(replace(link, latency=0.0), size) == 0.0


def test_advice_lines():
    lines = advise(STEP, [replace(FAST, bandwidth=1 * GB)], "Buckets of 3 MiB.").lines()
    assert len(lines) == 3
    assert "computes for 300 ms" in lines[0]
    assert "1000 MB/s, 10 us a message" in lines[0]
    assert "compression=powersgd" in lines[1]
    assert "changes the numbers" in lines[1]
    assert lines[2].endswith("Buckets of 3 MiB.")
    assert "what runs now" in advise(STEP, [FAST]).lines()[1]
    back = advise(replace(STEP, compression="topk"), [FAST])
    assert "type compression=none" in back.lines()[1]


def test_reports_unexplained_waits():
    assert "monitor=stragglers" in advise(replace(STEP, waits=0.2), [FAST]).lines()[2]
    assert "monitor=stragglers" not in advise(replace(STEP, waits=0.01), [FAST]).lines()[2]
    assert "monitor=stragglers" not in advise(replace(STEP, waits=14.0), [SLOW]).lines()[2]


def test_imports_no_torch():
    code = "import sys, trainwright.strategies.contract.communication.advice as a; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
