"""Parity of every registered strategy with one process.

A new strategy joins by being registered in :mod:`trainwright.strategies.contract.registry`.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch

from tests.parity.harness import Case, Record, bare_loop, data_parallel_names, differences, train, train_with_lightning
from tests.parity.modules import MODULES

WORLD_SIZES = (1, 2, 4)
ACCUMULATIONS = (1, 3)
CLIPPINGS = ("off", "norm", "value")
# Strategies that are not made for every number of ranks.
ONLY = {"single": (1,)}

PAIRS = [(name, n) for name in data_parallel_names() for n in WORLD_SIZES if n in ONLY.get(name, WORLD_SIZES)]

# Options that change how a strategy works and must not change what it computes.
VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "single-checkpointing": ("single", 1, {"activation_checkpointing": "full"}),
    "ddp-checkpointing": ("ddp", 2, {"activation_checkpointing": "full"}),
    "ddp-compile": ("ddp", 2, {"compile": {"backend": "aot_eager"}}),
    "ddp-small-buckets": ("ddp", 2, {"bucket_cap_mb": 1e-3}),
    "ddp-find-unused": ("ddp", 2, {"find_unused_parameters": True}),
    "zero1-hybrid": ("zero1", 4, {"replicate": 2, "shard": 2}),
    "zero2-hybrid": ("zero2", 4, {"replicate": 2, "shard": 2}),
    "zero3-hybrid": ("zero3", 4, {"replicate": 2, "shard": 2}),
    "zero1-replicate": ("zero1", 2, {"replicate": -1, "shard": 1}),
    "zero3-replicate": ("zero3", 2, {"replicate": -1, "shard": 1}),
    "zero1-small-buckets": ("zero1", 4, {"bucket_mib": 1e-3}),
    "zero2-small-buckets": ("zero2", 4, {"bucket_mib": 1e-3}),
    "zero1-find-unused": ("zero1", 2, {"find_unused_parameters": True}),
    "zero2-no-sync": ("zero2", 2, {"no_sync_accumulation": True}),
    "zero3-no-sync": ("zero3", 2, {"no_sync_accumulation": True}),
    "zero1-offload": ("zero1", 2, {"offload": "optimizer"}),
    "zero2-offload": ("zero2", 2, {"offload": "optimizer"}),
    "zero3-offload": ("zero3", 2, {"offload": "optimizer"}),
    "zero3-offload-parameters": ("zero3", 2, {"offload": "parameters"}),
    "zero3-named-blocks": ("zero3", 2, {"blocks": ["decoder.blocks.*.attention", "decoder.blocks.*.mlp"]}),
    "zero3-checkpointing": ("zero3", 2, {"activation_checkpointing": "full"}),
    "zero1-selective": (
        "zero1",
        2,
        {"activation_checkpointing": "selective", "checkpoint_modules": ["decoder.blocks.*.mlp"]},
    ),
    "zero1-compile": ("zero1", 2, {"compile": {"backend": "aot_eager"}}),
    "zero3-compile": ("zero3", 2, {"compile": {"backend": "aot_eager"}}),
}


def run_cases(cases: list[Case], strategy: str, options: dict[str, Any], trained: Any) -> list[Record]:
    """On every rank: the records of all cases, one after the other."""
    return [trained(case, strategy, options) for case in cases]


def assert_parity(
    ranks: Any,
    cases: list[Case],
    strategy: str,
    world_size: int,
    options: dict[str, Any],
    trained: Any = train,
    cancelled: tuple[str, ...] = (),
) -> None:
    results = ranks(run_cases, world_size, cases, strategy, options, trained, timeout=240)
    found = [
        f"rank {rank}, {case}: {difference}"
        for rank, records in enumerate(results)
        for case, record in zip(cases, records, strict=True)
        for difference in differences(record, bare_loop(_one_pass(case)))
        if not difference.startswith(cancelled)
    ]
    for rank, records in enumerate(results):
        for case, record, first in zip(cases, records, results[0], strict=True):
            found += [
                f"rank {rank}, {case}: {what} differs in bits from rank 0" for what in bit_differences(record, first)
            ]
    assert not found, "\n".join(found)


def bit_differences(record: Record, other: Record) -> list[str]:
    """Return which parts differ in any bit: ranks that drift apart hold different models."""
    found = [] if record.losses == other.losses else ["losses"]
    for kind in ("gradients", "parameters"):
        ours, theirs = getattr(record, kind), getattr(other, kind)
        found += [f"{kind} {name}" for name in theirs if not torch.equal(ours[name], theirs[name])]
    return found


def _one_pass(case: Case) -> Case:
    """Return the reference's case, which reads the samples of a step at once."""
    return Case(case.module, case.clipping, 1, case.global_batch_size, case.steps, case.samples)


def cases_of(strategy: str, world_size: int) -> list[Case]:
    """Each module, on two ranks with each accumulation, else with one of them; clippings take turns."""
    first = data_parallel_names().index(strategy)
    both = [(ACCUMULATIONS[turn % 2], CLIPPINGS[turn % 3]) for turn in range(6)]
    return [
        Case(module, clipping, accumulation)
        for place, module in enumerate(MODULES, first)
        for accumulation, clipping in [both[(place + 3 * other) % 6] for other in range(2 if world_size == 2 else 1)]
    ]


def test_every_pair_is_tried():
    """The cases cover any two of strategy, module, clipping and accumulation, and each module with both of these."""
    tried = {(name, case) for name, world_size in PAIRS for case in cases_of(name, world_size)}
    assert {(case.module, case.clipping, case.accumulation) for _, case in tried} == set(
        product(MODULES, CLIPPINGS, ACCUMULATIONS)
    )
    several = {name for name, _ in PAIRS} - ONLY.keys()
    assert {(name, c.clipping, c.accumulation) for name, c in tried} >= set(product(several, CLIPPINGS, ACCUMULATIONS))
    assert {(name, c.module, c.accumulation) for name, c in tried} >= set(product(several, MODULES, ACCUMULATIONS))


@pytest.mark.sample(5)
@pytest.mark.parametrize(("strategy", "world_size"), PAIRS)
def test_parity_with_one_process(ranks, strategy, world_size):
    assert_parity(ranks, cases_of(strategy, world_size), strategy, world_size, {})


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", [name for name, world_size in PAIRS if world_size == 2])
def test_twenty_steps(ranks, strategy):
    # By then the gradient of the scalar is a sum of terms a thousand times as large: float32 itself is off by 1e-5.
    cases = [Case("decoder-sgd", steps=20), Case("decoder-adamw", steps=20)]
    assert_parity(ranks, cases, strategy, 2, {}, cancelled=("gradients decoder.temperature:",))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("strategy", "world_size"), PAIRS)
def test_parity_on_uneven_data(ranks, strategy, world_size):
    """The last step of an epoch has fewer samples than the others; with 37, fewer than ranks."""
    sizes = [(1, 37), (3, 30)] + ([(3, 37), (1, 43)] if world_size == 2 else [])
    # To the end of the second epoch with 30 samples, and into it with the others.
    cases = [Case("decoder-sgd", accumulation=a, samples=s, steps=6) for a, s in sizes]
    assert_parity(ranks, cases, strategy, world_size, {})


@pytest.mark.sample(4)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_options_keep_parity(ranks, variant):
    strategy, world_size, options = VARIANTS[variant]
    alternates = list(VARIANTS).index(variant) % 2 and "no-sync" not in variant
    accumulation = 1 if alternates else 3
    assert_parity(ranks, [Case("decoder-sgd", "norm", accumulation)], strategy, world_size, options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", data_parallel_names())
def test_a_strategy_works_in_lightnings_own_trainer(ranks, strategy):
    world_size = 1 if strategy == "single" else 2
    cases = [Case("tied-sgd", clipping, accumulation) for clipping, accumulation in (("norm", 1), ("value", 3))]
    assert_parity(ranks, cases, strategy, world_size, {}, trained=train_with_lightning)


def test_the_comparison_notices():
    """A framework that compares nothing would pass as well."""
    case = Case("decoder-sgd")
    record = deepcopy(bare_loop(case))
    assert differences(record, bare_loop(case)) == []
    record.losses[1] *= 1 + 1e-4
    record.gradients["decoder.head.weight"] *= 0.5
    record.parameters["decoder.norm.weight"][3] += 1e-3
    del record.losses[-1]
    found = differences(record, bare_loop(case))
    assert len(found) == 4, found
    record.parameters.pop("decoder.temperature")
    assert any("missing ['decoder.temperature']" in text for text in differences(record, bare_loop(case)))
