"""Is what a recipe needs beyond the package installed? Asked without importing it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

MISSING = (
    "The recipe {recipe} reads a data set of scikit-learn, which is not installed. "
    'Type: pip install "trainwright[recipes]"'
)


def check_scikit_learn(config: Mapping[str, Any], num_data_ranks: int) -> list[str]:
    """The problem of a missing scikit-learn; empty when it is there.

    Args:
        config: the composed configuration.
        num_data_ranks: ranks that read different samples.
    """
    return [] if importlib.util.find_spec("sklearn") else [MISSING.format(recipe=config["name"])]
