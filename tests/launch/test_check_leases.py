from __future__ import annotations

import pytest

from trainwright.command import run
from trainwright.command.schema.compose import compose_checked


def problems(*overrides: str) -> list[str]:
    given = ["recipe=digits", "strategy=parameter_server", "devices=2", "accelerator=cpu", *overrides]
    result = compose_checked(given)
    assert result.cfg is not None
    return [*result.problems, *run.plan(result.cfg, "fit", None)[1]]


LEASING = ("strategy.consistency=async", "strategy.leases=at_most_once", "monitor=none")


def test_leases_can_be_had() -> None:
    assert problems(*LEASING, "trainer.limit_train_batches=10") == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["strategy.leases=twice"], "strategy.leases=twice: unknown; allowed: none, at_least_once, at_most_once"),
        (["strategy.leases=at_least_once"], "type strategy.consistency=async"),
        (
            ["strategy.leases=at_least_once", "strategy.consistency=ssp", "strategy.staleness=3", "monitor=none"],
            "no worker could read over strategy.staleness=3 chunks more than the slowest",
        ),
        ([*LEASING, "trainer.val_check_interval=5"], "type trainer.val_check_interval=1.0"),
        ([*LEASING, "trainer.limit_train_batches=0.5"], "type a whole number"),
        ([*LEASING, "trainer.data_partition=hash"], "type trainer.data_partition=interleave"),
        ([*LEASING, "trainer.uneven_steps=true"], "type trainer.uneven_steps=false"),
        ([*LEASING, "checkpoint.last.every_n_steps=5"], "type checkpoint.last.every_n_epochs=1"),
    ],
)
def test_what_leases_cannot_is_refused_before_a_process_starts(overrides: list[str], said: str) -> None:
    found = problems(*overrides)
    assert len(found) == 1, found
    assert said in found[0]
