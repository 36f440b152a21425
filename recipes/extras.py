"""Check for optional dependencies of recipes, without importing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

MISSING = (
    "The recipe {recipe} reads a data set of scikit-learn, which is not installed. "
    'Type: pip install "trainwright[recipes]"'
)


def check_scikit_learn(config: Mapping[str, Any], num_data_ranks: int) -> list[str]:
    """Return a problem if scikit-learn is missing.

    Args:
        config: the composed configuration.
        num_data_ranks: ranks that read different samples.
    """
    return [] if importlib.util.find_spec("sklearn") else [MISSING.format(recipe=config["name"])]
