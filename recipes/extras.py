"""Check for optional dependencies of recipes, without importing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

MISSING = (
    "The recipe {recipe} reads a data set of scikit-learn, which is not installed. "
    'Type: pip install "trainwright[recipes]"'
)
MISSING_TORCHAO = (
    'module.float8={given} needs torchao, which is not installed. Type: pip install "trainwright[torchao]"'
)
FLOAT8_RECIPES = ("rowwise", "tensorwise", "mxfp8")
"""Scaling of float8 numbers, by torchao's names."""


def check_scikit_learn(config: Mapping[str, Any], num_data_ranks: int) -> list[str]:
    """Return a problem if scikit-learn is missing.

    Args:
        config: the composed configuration.
        num_data_ranks: ranks that read different samples.
    """
    return [] if importlib.util.find_spec("sklearn") else [MISSING.format(recipe=config["name"])]


def check_float8(config: Mapping[str, Any], num_data_ranks: int) -> list[str]:
    """Return problems of ``module.float8``.

    Args:
        config: the composed configuration.
        num_data_ranks: ranks that read different samples.
    """
    given = config["module"].get("float8")
    if given is None:
        return []
    problems = []
    if given not in FLOAT8_RECIPES:
        allowed = ", ".join(FLOAT8_RECIPES)
        problems.append(f"module.float8={given} (allowed: null, {allowed}). Type module.float8=rowwise")
    elif importlib.util.find_spec("torchao") is None:
        problems.append(MISSING_TORCHAO.format(given=given))
    if config["precision"] not in ("bf16-mixed", "bf16-true"):
        problems.append(
            f"module.float8={given} with precision={config['precision']}: float8 kernels return bf16. Type "
            "precision=bf16-mixed (or bf16-true)"
        )
    return problems
