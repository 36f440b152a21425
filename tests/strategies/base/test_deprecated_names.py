"""Deprecated attributes of strategies."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest

from trainwright import DDPStrategy
from trainwright.strategies.base.deprecated_names import DEPRECATED_NAMES
from trainwright.strategies.contract.registry import make_strategy


def test_deprecated_names_can_be_read() -> None:
    for name, new in DEPRECATED_NAMES.items():
        strategy: Any = make_strategy("diloco")
        part, _, own = new.partition(".")
        inspect.getattr_static(getattr(strategy, part), own)
        value = object()
        setattr(strategy, part, types.SimpleNamespace(**{own: value}))
        with pytest.warns(DeprecationWarning, match=rf"strategy\.{name} is deprecated; use strategy\.{new}"):
            assert getattr(strategy, name) is value


def test_unknown_names_raise() -> None:
    with pytest.raises(AttributeError, match="'DDPStrategy' object has no attribute 'data_ranks'"):
        _ = DDPStrategy().data_ranks


def test_refuses_overridden_deprecated_names() -> None:
    with pytest.raises(TypeError, match=r"Mine\.data_rank has no effect: it is data_rank of the strategy's ranks now"):
        type("Mine", (DDPStrategy,), {"data_rank": 0})
