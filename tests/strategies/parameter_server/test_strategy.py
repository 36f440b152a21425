"""``ParameterServerStrategy`` in the Trainer, against DDP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.harness import Case
from tests.parity.harness import differences as all_differences


def train(case: Case, strategy: str, options: dict[str, Any], **trainer_options: Any) -> Any:
    from tests.parity.harness import train as train_case

    record = train_case(case, strategy, options, **trainer_options)
    record.gradients = {}  # the average is the servers' alone
    return record


@pytest.mark.parametrize(
    ("case", "servers"),
    [
        (Case(), 1),
        (Case(module="decoder-adamw", clipping="norm", accumulation=2), 2),
        (Case(module="decoder-adamw", clipping="value"), 2),
    ],
    ids=str,
)
def test_in_step_is_ddp(ranks, case, servers):
    ours = ranks(train, 2, case, "parameter_server", {"servers": servers})
    theirs = ranks(train, 2, case, "ddp", {})
    assert all_differences(ours[0], theirs[0]) == []
    assert all_differences(ours[1], theirs[0]) == []
