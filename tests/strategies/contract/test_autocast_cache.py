"""Mixed precision keeps no half-precision copy of a weight beyond the operation that uses it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.strategies.contract.precision import AutocastPrecision


class Casts(TorchDispatchMode):
    """Counts how often a weight of this shape is cast."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.made = shape, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        self.made += op is torch.ops.aten._to_copy.default and tuple(out.shape) == self.shape
        return out


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_autocast_caches_no_weights(precision: str) -> None:
    layer = nn.Linear(64, 64, bias=False)
    with Casts((64, 64)) as casts, AutocastPrecision(precision, "cpu").forward_context():
        layer(layer(torch.ones(2, 64)))
    assert casts.made == 2
