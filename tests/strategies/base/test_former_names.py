"""Names that were on the strategy before its parts had them."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest

from trainwright import DDPStrategy
from trainwright.strategies.base.former_names import FORMER_NAMES
from trainwright.strategies.contract.registry import make_strategy


@pytest.mark.parametrize("name", FORMER_NAMES)
def test_former_names_can_be_read(name: str) -> None:
    strategy: Any = make_strategy("diloco")
    part, _, own = FORMER_NAMES[name].partition(".")
    inspect.getattr_static(getattr(strategy, part), own)
    value = object()
    setattr(strategy, part, types.SimpleNamespace(**{own: value}))
    with pytest.warns(DeprecationWarning, match=rf"strategy\.{name} is strategy\.{part}\.{own} now"):
        assert getattr(strategy, name) is value


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="'DDPStrategy' object has no attribute 'data_ranks'"):
        _ = DDPStrategy().data_ranks


def test_a_class_that_overrides_a_former_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Mine\.data_rank has no effect: it is data_rank of the strategy's ranks now"):
        type("Mine", (DDPStrategy,), {"data_rank": 0})
