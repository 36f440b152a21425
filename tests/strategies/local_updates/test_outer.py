"""Rounds of the common parameters."""

import torch
from torch import Tensor

from trainwright.strategies.local_updates.mean import ReplicaMean
from trainwright.strategies.local_updates.options import DiLoCoOptions
from trainwright.strategies.local_updates.outer import OuterParameters

CPU = torch.device("cpu")


def outer_of(parts: dict[str, Tensor]) -> OuterParameters:
    """One replica with plain outer steps; the head is a separate fragment."""
    mean = ReplicaMean(None, CPU, lambda name: "", 1 << 20)
    options = DiLoCoOptions(outer_lr=1.0, outer_momentum=0.0, outer_nesterov=False)
    return OuterParameters(parts, lambda name: int(name == "head"), mean, options)


def test_parameters_unfrozen_during_a_flight_join_the_next_round() -> None:
    parts = {"body": torch.zeros(3), "head": torch.zeros(2)}
    outer = outer_of(parts)
    parts["body"] += 1.0
    outer.launch(0, parts)
    parts["thawed"] = torch.full((4,), 5.0)
    outer.launch(1, parts)
    outer.land()
    assert outer.common()["body"].tolist() == [1.0] * 3
    assert outer.common()["thawed"].tolist() == [5.0] * 4
    parts["thawed"] += 1.0
    outer.launch(0, parts)
    outer.land(0)
    assert outer.common()["thawed"].tolist() == [6.0] * 4
